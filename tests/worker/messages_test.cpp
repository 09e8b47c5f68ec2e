// Messages between a supervisor and its worker arrive as they were sent, or not at all.
#include "tuning/protocol/messages.hpp"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <sstream>
#include <thread>

#include "support/catch.hpp"
#include "support/strangers.hpp"
#include "tuning/protocol/line_channel.hpp"
#include "tuning/remote/remote_channel.hpp"
#include "tuning/remote/remote_evaluator.hpp"
#include "tuning/worker/in_flight_record.hpp"
#include "tuning/worker/supervisor.hpp"

using namespace fftune;

namespace {

JsonValue again(const JsonValue& message) {
  return parse_json(line_of(message));
}

/// Whether the text was read. Whatever it is, nothing but an Error of one line may come of it.
template <typename Read>
bool reads(const std::string& text, const Read& read) {
  try {
    read(parse_json(text));
    return true;
  } catch (const Error& error) {
    const std::string said = error.what();
    if (said.empty() || said.find('\n') != said.npos) FAIL("no line: " << said);
    return false;
  }
}

/// The text with a few bytes or numbers of it changed.
std::string mutated(std::string text, std::mt19937& random) {
  static const std::string bytes("\"{}[]:,0-9.eE+ \n\\\xff\xc3tfnu", 24);
  static constexpr std::array values{
      "-1",  "0",    "1e400", "-1e400", "2147483648", "18446744073709551616",
      "1.5", "null", "[]",    "{}",     "true",       "\"\""};
  for (auto changes = random() % 3 + 1; changes > 0 && !text.empty(); --changes) {
    const std::size_t place = random() % text.size();
    switch (random() % 4) {
      case 0:
        text[place] = bytes[random() % bytes.size()];
        break;
      case 1:
        text.erase(place, 1 + random() % 8);
        break;
      default: {  // the value behind a colon, a comma or a bracket
        const std::size_t begin = text.find_first_of(":,[", place);
        if (begin == text.npos) break;
        const std::size_t end = text.find_first_of(",]}", begin + 1);
        text.replace(begin + 1, end == text.npos ? end : end - begin - 1,
                     values[random() % values.size()]);
      }
    }
  }
  return text;
}

/// Reads mutated forms of a message; some are read, most are refused.
template <typename Read>
void read_mutated(const JsonValue& message, const Read& read) {
  const std::string good = line_of(message);
  REQUIRE(reads(good, read));
  std::mt19937 random(20261128);
  int refused = 0;
  for (int round = 0; round < 3000; ++round) refused += reads(mutated(good, random), read) ? 0 : 1;
  CHECK(refused > 300);
  CHECK(refused < 3000);
}

template <typename Message>
void read_mutated(const Message& message) {
  read_mutated(message_of(message), [](const JsonValue& value) { read_message<Message>(value); });
}

}  // namespace

TEST_CASE("values survive the way, infinities included") {
  Candidate candidate{1, {{"a", {{"bm", 64}}}, {"b", {{"x", -1}}}}, ""};
  CHECK(read_candidate(again(message_of(candidate))) == candidate);
  const Problem problem{"ffn", "fwd", DType::bf16, {{"m", 7}, {"d", 1LL << 30}}, {{"act", "silu"}}};
  CHECK(read_problem(again(message_of(problem))) == problem);
  const auto request = read_message<TimeRequest>(again(message_of(TimeRequest{})));
  CHECK(request.samples == TimeRequest{}.samples);
  CHECK(request.seconds == std::numeric_limits<double>::infinity());
  CHECK(request.abandon_above_us == std::numeric_limits<double>::infinity());
  Timing timing{{1.5, 2.25}, true, false, "words \xff of a compiler"};
  CHECK(read_message<Timing>(again(message_of(timing))).samples_us == timing.samples_us);
  DeviceFacts facts;
  facts.kind = DeviceKind::cuda;
  facts.name = "NVIDIA H200";
  facts.memory_bytes = 1LL << 37;
  facts.details = {{"a", "b"}, {"c", "d"}};
  const auto read = read_message<DeviceFacts>(again(message_of(facts)));
  CHECK(read.slug() == facts.slug());
  CHECK(read.memory_bytes == facts.memory_bytes);
  CHECK(read.details == facts.details);
}

TEST_CASE("nonsense is refused") {
  for (const char* text :
       {R"({})", R"([])", R"(7)",
        R"({"samples_us":[0],"abandoned":false,"device_fault":false,"failure":""})",
        R"({"samples_us":[-1],"abandoned":false,"device_fault":false,"failure":""})",
        R"({"samples_us":["x"],"abandoned":false,"device_fault":false,"failure":""})"})
    CHECK_THROWS(read_message<Timing>(parse_json(text)));
  JsonValue passed = message_of(Verified{true, 0.5, 1e-3, false, ""});
  CHECK_THROWS(read_message<Verified>(passed));  // more error than is tolerated
  passed["error"] = 1e-4;
  passed["bits"] = "00000000000000b1";
  CHECK(read_message<Verified>(passed).passed);
  CHECK(read_message<Verified>(passed).bits == "00000000000000b1");
  passed["failure"] = "but";
  CHECK_THROWS(read_message<Verified>(passed));
  JsonValue compiled = message_of(Compiled{});
  for (const JsonValue& value : JsonValue::Array{-1, 1e300, 0.5, "7"}) {
    compiled["registers"] = value;
    CHECK_THROWS(read_message<Compiled>(compiled));
  }
}

TEST_CASE("a mutated message is refused with one line, or is in range") {
  DeviceFacts facts;
  facts.name = "NVIDIA H200";
  facts.details = {{"a", "b"}};
  read_mutated(facts);
  read_mutated(Limits{1e12, 1e15, "measured"});
  read_mutated(TimeRequest{});
  read_mutated(Setup{});
  read_mutated(Compiled{});
  read_mutated(Verified{true, 0.5, 1, false, ""});
  read_mutated(message_of(Timing{{1.5, 2.25}, true, false, ""}), [](const JsonValue& value) {
    for (const double sample : read_message<Timing>(value).samples_us)
      if (!std::isfinite(sample) || sample <= 0) FAIL("a sample of " << sample);
  });
  const Candidate candidate{1, {{"a", {{"bm", 64}}}, {"b", {{"x", -1}}}}, ""};
  read_mutated(message_of(Candidates{candidate, candidate}),
               [](const JsonValue& value) { read_candidates(value); });
  read_mutated(message_of(Problem{"ffn", "fwd", DType::bf16, {{"m", 7}}, {{"act", "silu"}}}),
               [](const JsonValue& value) { read_problem(value); });
}

TEST_CASE("lines arrive whole, however they were cut, and the end is seen") {
  std::array<int, 2> ends;
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  LineChannel reader(ends[0]);
  {
    LineChannel writer(ends[1]);
    CHECK_FALSE(reader.receive(0));
    CHECK_FALSE(reader.closed());
    const std::string text = "one\ntw";
    REQUIRE(::send(ends[1], text.data(), text.size(), 0) == 6);
    CHECK(reader.receive(1) == "one");
    CHECK_FALSE(reader.receive(0));
    CHECK(writer.send("o"));
    CHECK(reader.receive(1) == "two");
  }
  CHECK_FALSE(reader.receive(1));
  CHECK(reader.closed());
  CHECK_FALSE(reader.send("to nobody"));
}

TEST_CASE("a rank that compiles what it was not asked for, or twice, is lost") {
  const std::size_t said = GENERATE(0u, 2u, 1u << 30);
  std::array<int, 2> ends;
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  LineChannel rank(ends[1]);
  const auto compiled = [](std::size_t index) {
    return line_of({{"reply", "compiled"}, {"index", index}, {"compiled", message_of(Compiled{})}});
  };
  rank.send(line_of(
      {{"reply", "done"}, {"value", {{"facts", message_of(DeviceFacts{})}}}, {"lost", ""}}));
  RemoteEvaluator evaluator(std::make_unique<LineChannel>(ends[0]), "rank 1");
  rank.send(compiled(0));
  rank.send(compiled(said));
  rank.send(line_of({{"reply", "done"}, {"value", nullptr}, {"lost", ""}}));
  int heard = 0;
  const Candidate candidate{0, {{"a", {}}}, ""};
  evaluator.compile({candidate, candidate}, [&](std::size_t, const Compiled&) {
    ++heard;
    return true;
  });
  CHECK(heard == 1);
  CHECK_THAT(evaluator.lost(), ContainsSubstring("rank 1 sent an invalid message"));
}

TEST_CASE("a caller is heard whose first line comes in pieces") {
  Listener listener;
  std::istringstream invitation(listener.invitation());
  std::string addresses, word;
  std::uint16_t port = 0;
  invitation >> addresses >> port >> word;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int caller = ::socket(AF_INET, SOCK_STREAM, 0);
  REQUIRE(::connect(caller, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(::send(caller, word.data(), word.size(), 0) > 0);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ::send(caller, " rank 1\n", 8, 0);
  });
  const auto heard = listener.accept(2);
  later.join();
  ::close(caller);
  REQUIRE(heard);
  CHECK(heard->name == "rank 1");
}

TEST_CASE("strangers at the port of a search on several hosts hold no rank up") {
  Listener listener;
  const std::string& invitation = listener.invitation();
  const auto space = invitation.find(' ');
  const testing::Strangers strangers(
      static_cast<std::uint16_t>(std::stoi(invitation.substr(space + 1))),
      {"", "x", std::string(32, 'a') + " rank 2\n", "GET / HTTP/1.1\r\n\r\n",
       std::string(100000, 'b'), "\n"},
      std::string(32, 'c'));
  const auto begin = std::chrono::steady_clock::now();
  std::unique_ptr<LineChannel> channel;
  std::thread rank([&] {
    strangers.wait_until_there();
    channel = connect_to(invitation, "rank 1");
    channel->send("and its first message");
  });
  const auto caller = listener.accept(20);
  rank.join();
  REQUIRE(caller);
  CHECK(caller->name == "rank 1");
  CHECK(caller->channel->receive(5) == "and its first message");
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
  CHECK_FALSE(listener.accept(0.2));
  CHECK(strangers.answered() == 0);
}

TEST_CASE("a launch is seen by the other process until it lands") {
  InFlightRecord supervisor;
  InFlightRecord worker(dup(supervisor.descriptor()));
  CHECK_FALSE(supervisor.current());
  worker.launch(7, 0.25);
  REQUIRE(supervisor.current());
  CHECK(supervisor.current()->candidate == 7);
  CHECK(supervisor.current()->expected_seconds == 0.25);
  const auto number = supervisor.current()->number;
  worker.launch(7, 0.25);
  CHECK(supervisor.current()->number != number);
  worker.land();
  CHECK_FALSE(supervisor.current());
}

TEST_CASE("the watchdog's patience is a bounded multiple of what is expected") {
  const Watchdog watchdog;
  CHECK(watchdog.allowed(1e-4) == watchdog.least_seconds);
  CHECK(watchdog.allowed(1) == 50);
  CHECK(watchdog.allowed(10) == watchdog.most_seconds);
  CHECK(watchdog.allowed(100) == 300);
  CHECK(watchdog.allowed(0) == watchdog.most_seconds);
}
