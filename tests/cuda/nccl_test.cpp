// NCCL as groups use it, over a stand-in for the library.
#include "cuda/nccl.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "cuda/fake_nccl.hpp"
#include "cuda/shared_library.hpp"
#include "runtime/group.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/host_backend.hpp"
#include "support/strangers.hpp"

namespace fftune::cuda {

using test::error_of;

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// The stand-in as it was when it was loaded.
testing::FakeNccl& fresh_nccl() {
  const auto library = SharedLibrary::open(FFTUNE_FAKE_NCCL);
  REQUIRE(library);
  testing::FakeNccl* (*get)() = nullptr;
  library->load(get, "fftune_fake_nccl");
  testing::FakeNccl& fake = *get();
  const std::lock_guard lock(fake.mutex);
  fake.failing_call.clear();
  fake.ids.clear();
  fake.sums.clear();
  fake.blocks_init = fake.blocks_sums = fake.blocks_end = fake.has_async_error = false;
  fake.aborted = 0;
  return fake;
}

void here(const std::function<void()>& call) {
  call();
}

class OwnMemory final : public SharedBuffer {
 public:
  explicit OwnMemory(std::size_t bytes) : buffer_(bytes) { std::memset(buffer_.data(), 0, bytes); }
  void* data() const override { return buffer_.data(); }
  std::size_t bytes() const override { return buffer_.bytes(); }
  const SharedHandle& handle() const override { return handle_; }
  std::uint32_t* notices() const override { return words_; }
  std::uint64_t device_notices() const override { return reinterpret_cast<std::uint64_t>(words_); }

 private:
  fftune::test::HostBuffer buffer_;
  SharedHandle handle_;
  mutable std::uint32_t words_[2] = {};
};

/// A device with the stand-in for NCCL.
class Device final : public fftune::test::HostBackend {
 public:
  std::unique_ptr<SharedBuffer> allocate_shared(std::size_t bytes) override {
    return std::make_unique<OwnMemory>(bytes);
  }
  CommunicatorOptions::Id communicator_id() override {
    Nccl::Id id{};
    library_->check(library_->get_unique_id(&id), "ncclGetUniqueId", ErrorKind::unavailable);
    return id.bytes;
  }
  std::unique_ptr<Communicator> communicate(const CommunicatorOptions& options) override {
    return std::make_unique<NcclCommunicator>(library_, options, here);
  }

 private:
  std::shared_ptr<const Nccl> library_ = Nccl::open({}, FFTUNE_FAKE_NCCL);
};

/// "tcp://127.0.0.1:port/word", of a port that is free.
std::string free_place(const char* word) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  REQUIRE(::bind(socket, reinterpret_cast<sockaddr*>(&address), bytes) == 0);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &bytes);
  ::close(socket);
  return fmt::format("tcp://127.0.0.1:{}/{}", ntohs(address.sin_port), word);
}

GroupOptions rank_of(const std::string& name, int rank, int ranks = 2,
                     std::chrono::milliseconds timeout = 5s) {
  return {.name = name,
          .rank = rank,
          .ranks = ranks,
          .max_bytes = 4096,
          .timeout = timeout,
          .nccl = true};
}

/// The errors of two ranks, each in a thread.
std::array<std::string, 2> errors_of(const std::function<void(int rank)>& part) {
  std::array<std::string, 2> errors;
  std::thread other([&] { errors[1] = error_of([&] { part(1); }); });
  errors[0] = error_of([&] { part(0); });
  other.join();
  return errors;
}

}  // namespace

TEST_CASE("NCCL that is missing, or too old, says what to do") {
  CHECK_THROWS_WITH(Nccl::open({}, "/nowhere/libnccl.so.2"),
                    ContainsSubstring("NCCL is not at FFTUNE_NCCL, /nowhere/libnccl.so.2"));
  CHECK_THROWS_WITH(Nccl::open({}, "libc.so.6"),
                    ContainsSubstring("libc.so.6 has no ncclGetUniqueId"));
}

TEST_CASE("ranks of several hosts get one id, and their sums go to NCCL") {
  auto& fake = fresh_nccl();
  const std::string name = free_place("sums");
  const auto errors = errors_of([&](int rank) {
    Device device;
    const Group group(device, rank_of(name, rank));
    float x[3] = {}, y[3] = {};
    int stream = 0;
    sum_of_group(group.memory(), x, y, 3, DType::bf16, &stream);
    group.check();
    CHECK(group.largest(rank) == 1);
  });
  CHECK(errors == std::array<std::string, 2>{});
  REQUIRE(fake.ids.size() == 2);
  CHECK(fake.ids[0] == fake.ids[1]);
  REQUIRE(fake.sums.size() == 2);
  CHECK(fake.sums[0].elements == 3);
  CHECK(fake.sums[0].type == 9);
  CHECK(fake.sums[0].operation == 0);
  CHECK(fake.live == 0);
  CHECK(fake.aborted == 0);
}

TEST_CASE("a sum in a group without NCCL, or one that is gone, is one line") {
  fresh_nccl();
  float x = 0;
  CHECK_THROWS_WITH(sum_of_group(&x, &x, &x, 1, DType::f32, nullptr),
                    ContainsSubstring("make the group with nccl"));
  Device device;
  const Group group(device, rank_of(free_place("alone"), 0, 1));
  CHECK_NOTHROW(sum_of_group(group.memory(), &x, &x, 1, DType::f32, nullptr));
}

TEST_CASE("a rank on which NCCL fails is an error on all, in NCCL's words there") {
  auto& fake = fresh_nccl();
  for (const char* call : {"ncclGetUniqueId", "ncclCommInitRank"}) {
    fake.failing_call = call;
    const std::string name = free_place("fails");
    const auto errors = errors_of([&](int rank) {
      Device device;
      const Group group(device, rank_of(name, rank));
    });
    CAPTURE(call, errors[0], errors[1]);
    for (const auto& error : errors)
      CHECK_THAT(error, ContainsSubstring("unhandled system error: no way to the peer"));
  }
  CHECK(fake.live == 0);
}

TEST_CASE("ranks that NCCL does not bring together are an error in time") {
  auto& fake = fresh_nccl();
  fake.blocks_init = true;
  const std::string name = free_place("apart");
  const auto start = Clock::now();
  const auto errors = errors_of([&](int rank) {
    Device device;
    const Group group(device, rank_of(name, rank, 2, 300ms));
  });
  CHECK(Clock::now() - start < 3s);
  CAPTURE(errors[0], errors[1]);
  CHECK_THAT(errors[0], ContainsSubstring("NCCL: the ranks did not connect in time") ||
                            ContainsSubstring("did not arrive"));
  fake.blocks_init = false;
  // The threads that still waited end what they made.
  while (fake.aborted < 2 && Clock::now() - start < 10s) std::this_thread::sleep_for(1ms);
  CHECK(fake.aborted == 2);
  CHECK(fake.live == 0);
}

TEST_CASE("a rank that dies ends its peers' sums, which then are errors") {
  auto& fake = fresh_nccl();
  const std::string name = free_place("dies");
  const pid_t child = ::fork();
  if (child == 0) {
    Device device;
    const Group group(device, rank_of(name, 1));
    ::_exit(0);  // says nothing
  }
  fake.blocks_sums = true;
  Device device;
  const Group group(device, rank_of(name, 0));
  const auto start = Clock::now();
  float x = 0;
  CHECK_THROWS_WITH(sum_of_group(group.memory(), &x, &x, 1, DType::f32, nullptr),
                    ContainsSubstring("a rank of the group is gone") ||
                        ContainsSubstring("remote process exited"));
  CHECK(Clock::now() - start < 3s);
  ::waitpid(child, nullptr, 0);
  CHECK_THROWS_WITH(group.check(), ContainsSubstring("rank 1 died"));
  CHECK_THROWS_WITH(sum_of_group(group.memory(), &x, &x, 1, DType::f32, nullptr),
                    ContainsSubstring("make a new group"));
  CHECK(fake.aborted == 1);
}

TEST_CASE("a group ends while a graph has its sums, and its communicator ends with the graph") {
  auto& fake = fresh_nccl();
  Device device;
  for (const bool dies : {false, true}) {
    const std::string name = free_place("graph");
    const pid_t child = dies ? ::fork() : -1;
    if (child == 0) {
      const Group group(device, rank_of(name, 1));
      ::_exit(0);
    }
    auto group = std::make_unique<const Group>(device, rank_of(name, 0, dies ? 2 : 1));
    if (dies) {
      ::waitpid(child, nullptr, 0);
      const auto start = Clock::now();
      while (error_of([&] { group->check(); }).empty() && Clock::now() - start < 5s)
        std::this_thread::sleep_for(1ms);
      CHECK_THROWS_WITH(group->check(), ContainsSubstring("rank 1 died"));
    }
    fake.blocks_end = true;
    const auto start = Clock::now();
    group.reset();
    CHECK(Clock::now() - start < 5s);
    CHECK((dies || fake.live == 1));
    fake.blocks_end = false;
    while (fake.live != 0 && Clock::now() - start < 10s) std::this_thread::sleep_for(1ms);
    CHECK(fake.live == 0);
  }
}

TEST_CASE("a child of fork() leaves NCCL alone") {
  auto& fake = fresh_nccl();
  Device device;
  auto group = std::make_unique<const Group>(device, rank_of(free_place("fork"), 0, 1));
  const pid_t child = ::fork();
  if (child == 0) {
    group.reset();
    ::_exit(fake.live);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WEXITSTATUS(status) == 1);
  group.reset();
  CHECK(fake.live == 0);
}

TEST_CASE("a rank that leaves ends its peers' sums within the timeout") {
  auto& fake = fresh_nccl();
  const std::string name = free_place("leaves");
  const auto errors = errors_of([&](int rank) {
    Device device;
    const Group group(device, rank_of(name, rank, 2, 300ms));
    float x = 0;
    if (rank == 0) fake.blocks_sums = true;
    group.largest(0);
    if (rank == 0) sum_of_group(group.memory(), &x, &x, 1, DType::f32, nullptr);
  });
  CHECK_THAT(errors[0], ContainsSubstring("remote process exited"));
  CHECK(errors[1].empty());
  CHECK(fake.aborted == 1);
}

TEST_CASE("a fault that NCCL finds is an error of the group") {
  auto& fake = fresh_nccl();
  Device device;
  const Group group(device, rank_of(free_place("fault"), 0, 1));
  group.check();
  fake.has_async_error = true;
  CHECK_THROWS_WITH(group.check(),
                    ContainsSubstring("NCCL: a sum of the group: remote process exited"));
}

TEST_CASE("a rank with another word is not heard") {
  fresh_nccl();
  const std::string name = free_place("right");
  Device device;
  std::string stranger;
  std::thread other([&] {
    Device own;
    stranger = error_of([&] {
      const Group group(own, rank_of(name.substr(0, name.rfind('/')) + "/wrong", 1, 2, 500ms));
    });
  });
  const std::string error =
      error_of([&] { const Group group(device, rank_of(name, 0, 2, 500ms)); });
  other.join();
  CHECK_THAT(error, ContainsSubstring("1 of 2 ranks came"));
  CHECK_THAT(stranger,
             ContainsSubstring("rank 0 died while the group was made, or it is of another group"));
}

namespace {

/// The first bytes of a rank of version `number`, which has the group's name at `offset`.
std::string hello_of(const char* number, const std::string& name, std::size_t offset = 8) {
  std::string text(std::string("FFUTRO") + number);
  text.resize(offset);
  text += name;
  text.resize(2000);
  return text;
}

std::uint16_t port_of(const std::string& name) {
  const auto colon = name.rfind(':');
  return static_cast<std::uint16_t>(std::stoi(name.substr(colon + 1, name.rfind('/') - colon - 1)));
}

}  // namespace

TEST_CASE("strangers at the port of a group change nothing: no answer, no delay, no end") {
  fresh_nccl();
  const std::string name = free_place("word");
  const std::string place = name.substr(0, name.rfind('/'));
  std::array<std::string, 3> errors;
  const auto join = [&](std::size_t rank) {
    errors[rank] = error_of([&] {
      Device device;
      const Group group(device, rank_of(name, static_cast<int>(rank), 3, 20s));
      group.largest(0);
      group.check();
    });
  };
  const fftune::testing::Strangers strangers(
      port_of(name),
      {"", "F", "FFUTRO05", "FFUTRO06", "FFUTRO07", hello_of("05", ""), hello_of("06", ""),
       hello_of("06", place + "/wor"), hello_of("07", place + "/words"), hello_of("06", "word"),
       std::string(100000, 'x'), "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "\x16\x03\x01\x02"},
      hello_of("06", place + "/wor"));
  std::thread first([&] { join(0); });
  strangers.wait_until_there();
  const auto begin = Clock::now();
  std::thread second([&] { join(1); });
  std::this_thread::sleep_for(300ms);  // while those that came with the ranks are heard
  join(2);
  first.join();
  second.join();
  CHECK(errors == std::array<std::string, 3>{});
  CHECK(Clock::now() - begin < 5s);
  CHECK(strangers.answered() == 0);
}

TEST_CASE("strangers do not put off the end of a group whose ranks do not come") {
  fresh_nccl();
  Device device;
  const std::string name = free_place("word");
  const fftune::testing::Strangers strangers(port_of(name), {"FFUTRO07", ""}, "FFUTRO07 and more");
  const auto begin = Clock::now();
  const std::string error = error_of([&] { const Group group(device, rank_of(name, 0, 2, 1s)); });
  CHECK_THAT(error, ContainsSubstring("1 of 2 ranks came within 1 s"));
  CHECK(Clock::now() - begin < 4s);
  CHECK(strangers.answered() == 0);
}

TEST_CASE("a rank of another version that knows the word of the group is named on both") {
  fresh_nccl();
  // Version 5 had the name of the group elsewhere.
  for (const std::size_t offset : {8, 800}) {
    const std::string name = free_place("word");
    std::thread other([&] {
      int socket = -1;
      while ((socket = fftune::testing::connect_to_port(port_of(name))) < 0)
        std::this_thread::yield();
      const std::string hello = hello_of(offset == 8 ? "99" : "05", name, offset);
      CHECK(::send(socket, hello.data(), hello.size(), MSG_NOSIGNAL) > 0);
      std::array<char, 6> answer{};
      CHECK(::recv(socket, answer.data(), answer.size(), MSG_WAITALL) == 6);
      CHECK(std::string(answer.data(), answer.size()) == "FFUTRO");
      ::close(socket);
    });
    Device device;
    const std::string error =
        error_of([&] { const Group group(device, rank_of(name, 0, 2, 10s)); });
    other.join();
    CHECK_THAT(error, ContainsSubstring("several versions of fftune"));
  }
}

TEST_CASE("options of a group across hosts that are wrong are one line") {
  fresh_nccl();
  Device device;
  const auto error = [&](const std::string& name, bool nccl = true) {
    auto options = rank_of(name, 0, 2, 200ms);
    options.nccl = nccl;
    return error_of([&] { const Group group(device, options); });
  };
  CHECK_THAT(error("tcp://127.0.0.1/word"), ContainsSubstring("give tcp://host:port/word"));
  CHECK_THAT(error("tcp://no.such.host.invalid:99/word"),
             ContainsSubstring("give tcp://host:port/word"));
  CHECK_THAT(error("tcp://192.0.2.1:99/word"), ContainsSubstring("give an address of this host"));
  CHECK_THAT(error(free_place("word"), false), ContainsSubstring("give it NCCL"));
  CHECK_THAT(error(free_place(std::string(200, 'w').c_str())), ContainsSubstring("use 1 to 127"));
}

TEST_CASE("a CPU has no NCCL, and says so") {
  class Cpu final : public fftune::test::HostBackend {
    std::unique_ptr<SharedBuffer> allocate_shared(std::size_t bytes) override {
      return std::make_unique<OwnMemory>(bytes);
    }
  } cpu;
  CHECK_THAT(error_of([&] { const Group group(cpu, rank_of("cpu", 0, 1)); }),
             ContainsSubstring("is no device of NCCL: it needs GPUs"));
}

}  // namespace fftune::cuda
