// Shows this process another CPU: a library for LD_PRELOAD, made and described by masked_cpu.py.
//
// Linux lets a process ask for a fault at each CPUID instruction, where the CPU and the hypervisor
// know how. The handler below executes the instruction in its place and changes the answers as
// MASKED_CPU says: words of the form
//
//     leaf.subleaf.register=keep+set     the register is (answer & keep) | set
//     leaf>other                         the leaf is answered as the other one
//
// in hexadecimal numbers; subleaf * is any; registers 0 to 3 are EAX, EBX, ECX and EDX.

#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { kSetCpuid = 0x1012, kMost = 128, kAny = -1 };

typedef struct {
  uint32_t leaf, keep, set;
  long sub;
  int reg;
} Change;

static Change changes[kMost];
static uint32_t aliases[kMost][2];
static int change_count, alias_count;

typedef int (*Sigaction)(int, const struct sigaction*, struct sigaction*);
static Sigaction real_sigaction;
static struct sigaction theirs;  // what the program asked to be done at a real fault

static void faults(int on) { syscall(SYS_arch_prctl, kSetCpuid, on ? 0L : 1L); }

static void answer(greg_t* regs) {
  const uint32_t leaf = (uint32_t)regs[REG_RAX], sub = (uint32_t)regs[REG_RCX];
  uint32_t asked = leaf, r[4];
  for (int i = 0; i < alias_count; ++i)
    if (aliases[i][0] == leaf) asked = aliases[i][1];
  faults(0);
  __cpuid_count(asked, sub, r[0], r[1], r[2], r[3]);
  faults(1);
  for (int i = 0; i < change_count; ++i) {
    const Change* c = &changes[i];
    if (c->leaf == leaf && (c->sub == kAny || c->sub == (long)sub))
      r[c->reg] = (r[c->reg] & c->keep) | c->set;
  }
  regs[REG_RAX] = r[0], regs[REG_RBX] = r[1], regs[REG_RCX] = r[2], regs[REG_RDX] = r[3];
  regs[REG_RIP] += 2;
}

static void on_fault(int number, siginfo_t* info, void* context) {
  greg_t* regs = ((ucontext_t*)context)->uc_mcontext.gregs;
  // A CPUID fault is a general protection fault, which has no address; the code there is readable.
  const unsigned char* code = (const unsigned char*)regs[REG_RIP];
  if (info->si_code == SI_KERNEL && code[0] == 0x0f && code[1] == 0xa2) {
    answer(regs);
  } else if (theirs.sa_flags & SA_SIGINFO) {
    theirs.sa_sigaction(number, info, context);
  } else if (theirs.sa_handler != SIG_DFL && theirs.sa_handler != SIG_IGN) {
    theirs.sa_handler(number);
  } else {
    real_sigaction(SIGSEGV, &theirs, NULL);
    raise(SIGSEGV);  // on return, as it is blocked until then
  }
}

// The program's handlers of SIGSEGV are kept for its own faults.
int sigaction(int number, const struct sigaction* wanted, struct sigaction* before) {
  if (real_sigaction == NULL) real_sigaction = (Sigaction)dlsym(RTLD_NEXT, "sigaction");
  if (number != SIGSEGV) return real_sigaction(number, wanted, before);
  if (before != NULL) *before = theirs;
  if (wanted != NULL) theirs = *wanted;
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
  struct sigaction wanted = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
  sigemptyset(&wanted.sa_mask);
  return sigaction(number, &wanted, &before) == 0 ? before.sa_handler : SIG_ERR;
}

static void read_changes(const char* text) {
  for (int length; *text != 0; text += length + strspn(text + length, " ")) {
    char sub[16];
    unsigned leaf, reg, keep, set, other;
    length = (int)strcspn(text, " ");
    if (change_count == kMost || alias_count == kMost) abort();
    if (sscanf(text, "%x>%x", &leaf, &other) == 2) {
      aliases[alias_count][0] = leaf;
      aliases[alias_count++][1] = other;
    } else if (sscanf(text, "%x.%15[^.].%x=%x+%x", &leaf, sub, &reg, &keep, &set) == 5 && reg < 4) {
      const long which = sub[0] == '*' ? kAny : strtol(sub, NULL, 16);
      changes[change_count++] = (Change){leaf, keep, set, which, (int)reg};
    } else {
      fprintf(stderr, "MASKED_CPU: cannot read %.*s\n", length, text);
      abort();
    }
  }
}

__attribute__((constructor)) static void begin(void) {
  const char* text = getenv("MASKED_CPU");
  if (text == NULL) return;
  read_changes(text);
  if (real_sigaction == NULL) real_sigaction = (Sigaction)dlsym(RTLD_NEXT, "sigaction");
  struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
  sigemptyset(&ours.sa_mask);
  real_sigaction(SIGSEGV, &ours, &theirs);
  if (syscall(SYS_arch_prctl, kSetCpuid, 0L) != 0) {
    fprintf(stderr, "MASKED_CPU: this CPU or system cannot let CPUID fault\n");
    _exit(3);
  }
}
