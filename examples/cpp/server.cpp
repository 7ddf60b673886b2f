// Serves a program file over HTTP, without Python and without torch.
//
//     c++ -O2 server.cpp $(x86quant cpp --cflags --libs) -pthread -o server
//     ./server model.xq --port 8000
//
//     GET  /health   200 "ok"
//     GET  /shapes   the input shapes that the file has plans for, one a line
//     POST /run      float32 in, float32 out, little-endian and row by row; the header X-Shape: 1,3,224,224 says the
//                    shape, and the answer has one too
//
// An example to start from, not a product: one model, no TLS, and nothing that holds back a hostile client but limits
// on sizes and times. SIGTERM and SIGINT let requests that run end, then the server exits with status 0.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <x86quant/runtime.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kMostHeader = 16 << 10;
constexpr size_t kMostBody = size_t{256} << 20;
constexpr int kTick = 100;           // milliseconds between looks at `stopping`
constexpr int kMostTicks = 100;      // of silence in the middle of a request

volatile std::sig_atomic_t stopping = 0;

std::string listed(const int64_t* sizes, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) text += (i ? "," : "") + std::to_string(sizes[i]);
  return text;
}

// Whether something can be read. False too when the server stops while `idle`, or after a long silence.
bool readable(int socket, bool idle) {
  for (int ticks = 0; idle ? !stopping : ticks < kMostTicks; ++ticks) {
    pollfd wanted{socket, POLLIN, 0};
    if (poll(&wanted, 1, kTick) > 0) return true;
  }
  return false;
}

bool receive(int socket, std::string& to, bool idle) {
  char buffer[64 << 10];
  if (!readable(socket, idle)) return false;
  const ssize_t count = recv(socket, buffer, sizeof(buffer), 0);
  if (count > 0) to.append(buffer, static_cast<size_t>(count));
  return count > 0;
}

void send_all(int socket, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t count = send(socket, data, size, MSG_NOSIGNAL);
    if (count <= 0) return;
    data += count, size -= static_cast<size_t>(count);
  }
}

void answer(int socket, const char* status, const std::string& headers, const void* body, size_t size) {
  const std::string head = std::string("HTTP/1.1 ") + status + "\r\nContent-Length: " + std::to_string(size) + "\r\n" +
                           headers + "\r\n";
  send_all(socket, head.data(), head.size());
  send_all(socket, static_cast<const char*>(body), size);
}

void tell(int socket, const char* status, const std::string& text) {
  answer(socket, status, "Content-Type: text/plain\r\n", (text + "\n").data(), text.size() + 1);
}

// The value of a header, empty where there is none.
std::string header(const std::string& head, const char* name) {
  const std::string start = std::string("\r\n") + name + ":";
  for (size_t at = 0; at + start.size() <= head.size(); ++at) {
    if (strncasecmp(head.data() + at, start.data(), start.size()) != 0) continue;
    const size_t first = head.find_first_not_of(' ', at + start.size()), end = head.find("\r\n", first);
    return head.substr(first, end - first);
  }
  return "";
}

// "1,3,224,224"; empty where the text is nothing like it.
std::vector<int64_t> shape_of(const std::string& text) {
  std::vector<int64_t> sizes;
  for (const char* at = text.c_str(); *at != 0;) {
    char* end = nullptr;
    const long long size = std::strtoll(at, &end, 10);
    if (end == at || size < 1 || (*end != ',' && *end != 0)) return {};
    sizes.push_back(size);
    at = *end == ',' ? end + 1 : end;
  }
  return sizes;
}

void run(const x86quant::Program& program, int socket, const std::string& head, const std::string& body) {
  const std::vector<int64_t> shape = shape_of(header(head, "X-Shape"));
  std::vector<float> input(body.size() / sizeof(float));
  std::memcpy(input.data(), body.data(), input.size() * sizeof(float));
  try {
    std::vector<int64_t> sizes;
    const std::vector<float> output = program.run(input, shape, &sizes);
    const std::string headers = "X-Shape: " + listed(sizes.data(), sizes.size()) + "\r\n";
    answer(socket, "200 OK", headers + "Content-Type: application/octet-stream\r\n", output.data(),
           output.size() * sizeof(float));
  } catch (const x86quant::Error& error) {
    const bool theirs = error.status == X86QUANT_WRONG_SHAPE || error.status == X86QUANT_BAD_ARGUMENT;
    tell(socket, theirs ? "400 Bad Request" : "500 Internal Server Error", error.what());
  } catch (const std::exception& error) {
    tell(socket, "500 Internal Server Error", error.what());
  }
}

std::string shapes(const x86quant::Program& program) {
  std::string text;
  for (size_t plan = 0; plan < program.plans(); ++plan) {
    const x86quant_tensor input = program.input(plan);
    text += (plan ? "\n" : "") + listed(input.sizes, static_cast<size_t>(input.rank));
  }
  return text;
}

// One request after another, until the client or the server ends the connection.
void converse(const x86quant::Program& program, int socket) {
  std::string received;
  for (bool last = false; !last && !stopping;) {
    size_t end;
    while ((end = received.find("\r\n\r\n")) == std::string::npos) {
      if (received.size() > kMostHeader) return tell(socket, "431 Request Header Fields Too Large", "too long");
      if (!receive(socket, received, received.empty())) return;
    }
    const std::string head = received.substr(0, end + 2);
    received.erase(0, end + 4);
    if (!header(head, "Transfer-Encoding").empty()) return tell(socket, "411 Length Required", "give Content-Length");
    const size_t length = std::strtoull(header(head, "Content-Length").c_str(), nullptr, 10);
    if (length > kMostBody) return tell(socket, "413 Content Too Large", "the body is too large");
    if (strcasecmp(header(head, "Expect").c_str(), "100-continue") == 0) send_all(socket, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    while (received.size() < length)
      if (!receive(socket, received, false)) return;
    const std::string body = received.substr(0, length);
    received.erase(0, length);
    last = strcasecmp(header(head, "Connection").c_str(), "close") == 0;
    const std::string request = head.substr(0, head.find(" HTTP/"));
    if (request == "GET /health") tell(socket, "200 OK", "ok");
    else if (request == "GET /shapes") tell(socket, "200 OK", shapes(program));
    else if (request == "POST /run") run(program, socket, head, body);
    else tell(socket, "404 Not Found", "there are GET /health, GET /shapes and POST /run");
  }
}

void serve(const x86quant::Program& program, int listener) {
  while (!stopping) {
    if (!readable(listener, true)) continue;
    const int socket = accept(listener, nullptr, nullptr);
    if (socket < 0) continue;  // another thread was quicker
    const int yes = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    const timeval patience{10, 0};
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    converse(program, socket);
    close(socket);
  }
}

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "server: %s\n", why.c_str());
  std::exit(1);
}

int listening(int port) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int yes = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  auto* place = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, place, sizeof(address)) != 0 || listen(listener, 128) != 0)
    give_up("cannot listen on port " + std::to_string(port) + ": " + std::strerror(errno) + "; choose another with --port");
  socklen_t size = sizeof(address);
  getsockname(listener, place, &size);
  std::printf("listening on http://127.0.0.1:%d\n", ntohs(address.sin_port));
  std::fflush(stdout);
  return listener;
}

int number(const char* text, const char* option, int least, int most) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != 0 || value < least || value > most)
    give_up(std::string(option) + " takes a number from " + std::to_string(least) + " to " + std::to_string(most));
  return static_cast<int>(value);
}

}  // namespace

int main(int argc, char** argv) {
  const char* file = nullptr;
  int port = 8000, threads = 0, workers = 4;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--port" && i + 1 < argc) port = number(argv[++i], "--port", 0, 65535);
    else if (word == "--threads" && i + 1 < argc) threads = number(argv[++i], "--threads", 1, 1024);
    else if (word == "--workers" && i + 1 < argc) workers = number(argv[++i], "--workers", 1, 1024);
    else if (file == nullptr && word[0] != '-') file = argv[i];
    else give_up("usage: server model.xq [--port 8000] [--threads N] [--workers 4]");
  }
  if (file == nullptr) give_up("usage: server model.xq [--port 8000] [--threads N] [--workers 4]");
  struct sigaction stop{};
  stop.sa_handler = [](int) { stopping = 1; };
  sigaction(SIGTERM, &stop, nullptr);
  sigaction(SIGINT, &stop, nullptr);
  try {
    const x86quant::Program program(file, threads);
    if (x86quant_inputs(program.get()) != 1 || x86quant_outputs(program.get()) != 1)
      give_up("this example serves models with one input and one output");
    const int listener = listening(port);
    std::vector<std::thread> all;
    for (int i = 0; i < workers; ++i) all.emplace_back(serve, std::cref(program), listener);
    for (std::thread& thread : all) thread.join();
    std::printf("stopped\n");
  } catch (const std::exception& error) {
    give_up(error.what());
  }
}
