// Keeps the extension loadable with glibc 2.28, which its wheels promise (manylinux_2_28).

// libstdc++ counts references without atomics while glibc says that there is one thread. glibc says
// so from 2.32 on, by this name; ours says that there may be several, which is always right.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
