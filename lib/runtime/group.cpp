#include "runtime/group.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/fork.hpp"
#include "core/pending_connections.hpp"
#include "core/socket.hpp"
#include "runtime/group_messages.hpp"

namespace fftune {

using namespace group_messages;

class Group::Members {
 public:
  Members(Backend& backend, const GroupOptions& options)
      : options_(options),
        deadline_(Clock::now() + options.timeout),
        over_network_(options.name.starts_with(tcp_scheme)),
        table_(group_layout(options.ranks, over_network_ ? 1 : options.max_bytes)) {
    table_.rank = static_cast<std::uint32_t>(options.rank);
    table_.timeout = static_cast<std::uint64_t>(std::chrono::nanoseconds(options.timeout).count());
    connections_.resize(static_cast<std::size_t>(options.ranks));
    opened_.resize(static_cast<std::size_t>(options.ranks));
    values_.resize(static_cast<std::size_t>(options.ranks));
    ends_.resize(static_cast<std::size_t>(options.ranks));
    // A rank without memory comes all the same: others would wait for it until their timeout.
    std::optional<Error> without;
    try {
      own_ = backend.allocate_shared(group_bytes(table_));
    } catch (const Error& error) {
      if (options.ranks == 1) throw;
      without.emplace(error.kind(), fmt::format("group '{}', rank {}: {}", options.name,
                                                options.rank, error.what()));
    }
    if (own_) table_.status = own_->device_notices();
    if (options.ranks > 1) {
      if (options.rank == 0)
        gather(backend, without);
      else
        join(backend, without);
    }
    for (int rank = 0; rank < options.ranks; ++rank)
      if (const auto& theirs = opened_[static_cast<std::size_t>(rank)];
          rank == options.rank || theirs)
        table_.base[rank] =
            reinterpret_cast<std::uint64_t>(rank == options.rank ? own_->data() : theirs->data());
    // So plans of link=peers end, which would look for memory that is not there.
    if (over_network_) table_.ranks = 0;
    backend.write(own_->data(), &table_, sizeof table_);
    if (options.ranks == 1) return;
    agree();
    stop_ = Socket(::eventfd(0, EFD_CLOEXEC));
    watcher_ = std::thread([this] { watch(); });
  }

  ~Members() {
    if (fork_count() != forks_) {  // the thread is not in this process
      if (watcher_.joinable()) watcher_.detach();
      return;
    }
    // A collective of another thread would be left without its memory.
    std::uint32_t none = 0;
    std::atomic_ref<std::uint32_t>(own_->notices()[1])
        .compare_exchange_strong(none, fault_code(GroupFault::left, options_.rank));
    own_->wait_until_unused();
    if (!watcher_.joinable()) return;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof one);
    watcher_.join();
    Message gone{.kind = Kind::gone, .rank = options_.rank};
    gone.fault = fault_code(GroupFault::left, options_.rank);
    for (const auto& socket : connections_)
      if (socket) send_message(socket, gone);
  }

  /// Once the ranks watch each other, so that one that dies meanwhile is known.
  void communicate(Backend& backend) {
    if (!options_.nccl) return;
    std::string failure;
    try {
      if (options_.ranks == 1) id_ = backend.communicator_id();
      communicator_of({id_, options_.rank, options_.ranks, own_->data(), deadline_,
                       [this] { return is_lost(); }},
                      backend);
    } catch (const Error& error) {
      failure = fmt::format("group '{}', rank {}: {}", options_.name, options_.rank, error.what());
    }
    const auto failed = static_cast<int>(largest(failure.empty() ? -1 : options_.rank));
    if (failure.empty() && failed >= 0)
      failure =
          fmt::format("group '{}': NCCL failed on rank {}, which says why", options_.name, failed);
    if (!failure.empty()) refuse(failure);
  }

  void* memory() const { return own_->data(); }
  const GroupOptions& options() const { return options_; }

  double largest(double value) {
    expect_own();
    if (options_.ranks == 1) return value;
    const Message own{.kind = Kind::value, .rank = options_.rank, .value = value};
    if (options_.rank != 0) {
      send_message(connections_[0], own);
      return next_value(0);
    }
    Message all = own;
    for (int rank = 1; rank < options_.ranks; ++rank)
      all.value = std::max(all.value, next_value(rank));
    for (const auto& socket : connections_)
      if (socket) send_message(socket, all);
    return all.value;
  }

  void check() const {
    expect_own();
    for (const int word : {0, 1}) {
      const std::uint32_t code = std::atomic_ref<std::uint32_t>(own_->notices()[word]).load();
      // A rank that leaves is missed only by a collective that waits for it.
      const bool left = static_cast<GroupFault>(code & 0xff) == GroupFault::left;
      if (code != 0 && (word == 0 || !left))
        throw Error(ErrorKind::device_fault,
                    over_network_ && code == fault_code(GroupFault::other_problem, options_.rank)
                        ? "a plan of link=peers ran in a group across hosts: give link=nccl"
                        : fault_text(code, options_.timeout));
    }
    if (communicator_) communicator_->check();
  }

 private:
  void expect_own() const {
    if (fork_count() != forks_) throw Error(ErrorKind::invalid_input, std::string(of_the_parent));
  }

  Message failure_of(const Error& error) const {
    Message message{.kind = Kind::failure, .rank = options_.rank};
    message.fault = static_cast<std::uint32_t>(error.kind());
    const std::string_view why = error.what();
    why.copy(message.text.data(), message.text.size() - 1);
    options_.name.copy(message.group.data(), message.group.size() - 1);
    return message;
  }

  static Error error_of(const Message& failure) {
    return {static_cast<ErrorKind>(failure.fault), failure.text.data()};
  }

  Message hello(const Backend& backend) const {
    Message message{.kind = Kind::hello, .rank = options_.rank, .ranks = options_.ranks};
    message.device_kind = static_cast<std::uint32_t>(backend.facts().kind);
    message.max_bytes = options_.max_bytes;
    if (own_) {
      message.process = own_->handle().process;
      message.key = own_->handle().key;
      message.handle = own_->handle().bytes;
      message.device = own_->handle().device;
    }
    constexpr std::string_view version = FFTUNE_VERSION;
    version.copy(message.library.data(), message.library.size() - 1);
    options_.name.copy(message.group.data(), message.group.size() - 1);
    message.nccl = options_.nccl ? 1 : 0;
    message.id = id_;
    return message;
  }

  void open_memory(Backend& backend, const Received& from) {
    if (from.message.rank == 0) id_ = from.message.id;
    if (over_network_) return;
    SharedHandle handle;
    handle.process = from.message.process;
    handle.key = from.message.key;
    handle.bytes = from.message.handle;
    handle.device = from.message.device;
    handle.descriptor = from.descriptor;
    opened_[static_cast<std::size_t>(from.message.rank)] =
        backend.open_shared(handle, group_bytes(table_));
  }

  /// Why a rank's hello does not fit, or nothing.
  std::string mismatch(const Message& theirs, const Message& own) const {
    if (theirs.kind != Kind::hello || theirs.rank < 1 || theirs.rank >= options_.ranks ||
        theirs.ranks != options_.ranks)
      return fmt::format("rank {} of {} came to a group of {}: give all the same number of ranks",
                         theirs.rank, theirs.ranks, options_.ranks);
    if (connections_[static_cast<std::size_t>(theirs.rank)])
      return fmt::format("two processes came as rank {}", theirs.rank);
    if (theirs.library != own.library)
      return fmt::format("rank {} has fftune {} and rank 0 fftune {}: give all the same version",
                         theirs.rank, theirs.library.data(), own.library.data());
    if (theirs.device_kind != own.device_kind)
      return fmt::format("rank {} is on another kind of device than rank 0", theirs.rank);
    if (theirs.max_bytes != own.max_bytes)
      return fmt::format("max_bytes is {} on rank {} and {} on rank 0: give all the same",
                         theirs.max_bytes, theirs.rank, own.max_bytes);
    if (theirs.nccl != own.nccl)
      return fmt::format("rank {} is {} NCCL and rank 0 {}: give all the same", theirs.rank,
                         theirs.nccl ? "with" : "without", own.nccl ? "with it" : "without it");
    return "";
  }

  /// Tells all ranks that are there, and throws.
  [[noreturn]] void call_off(const std::string& why, ErrorKind kind = ErrorKind::unavailable) {
    const Error error(kind, why);
    const Message failure = failure_of(error);
    for (const auto& socket : connections_)
      if (socket) send_message(socket, failure);
    throw error;
  }

  /// Rank 0: waits for the others, and gives each all handles. `failed`: why this rank has no
  /// memory; that, or another rank's failure, is told to all when all have come.
  void gather(Backend& backend, std::optional<Error> failed) {
    const Address address(options_.name);
    const Socket listener = address.open();
    const auto binds = [&] { return ::bind(listener.get(), address.get(), address.bytes) == 0; };
    if (!listener || !(binds() || (errno == EADDRINUSE && address.remove_left() && binds())) ||
        ::listen(listener.get(), most_waiting) != 0)
      refuse(fmt::format("rank 0 cannot listen for group '{}': {}: {}", options_.name, reason(),
                         address.is_tcp ? "give an address of this host and a port that is free"
                         : errno == EADDRINUSE || !address.is_file
                             ? "give each group a name of its own"
                             : "give a path in a folder where this user can write"));
    const struct Removal {
      const Address& address;
      ~Removal() { address.remove(); }
    } removal{address};
    PendingConnections pending(
        listener.get(),
        {.judge =
             [&](std::string_view bytes) { return introduction_of(bytes, address, options_.name); },
         .most_bytes = sizeof(Message),
         .admits =
             [&](int socket) {
               // Others may connect to a name that anyone can see: they are not heard.
               if (!is_own_user(address, socket)) return false;
               if (address.is_tcp) Address::watch_line(socket);
               return true;
             }});
    std::vector<Received> members;
    std::size_t came = 1;  // ranks, this one and those that failed among them
    const Message own = hello(backend);
    while (came < static_cast<std::size_t>(options_.ranks)) {
      auto connection = next_of(pending);
      if (!connection) {
        if (failed) break;
        call_off(fmt::format("group '{}': {} of {} ranks came within {} s: start all of them",
                             options_.name, came, options_.ranks, seconds()));
      }
      Socket socket = std::move(connection->socket);
      Message first;
      std::memcpy(&first, connection->bytes.data(), connection->bytes.size());
      const auto received =
          received_as(first, connection->bytes.size(), std::move(connection->attached));
      if (!received) continue;
      if (address.is_tcp && !received->other_version && received->message.group != own.group)
        continue;
      if (received->other_version) {
        connections_.push_back(std::move(socket));  // it is told in the words of this version
        call_off(another_version(), ErrorKind::invalid_input);
      }
      if (received->message.kind == Kind::failure) {
        if (!failed) failed = error_of(received->message);
        ++came;
        continue;
      }
      if (const auto why = mismatch(received->message, own); !why.empty()) {
        if (received->descriptor >= 0) ::close(received->descriptor);
        connections_.push_back(std::move(socket));  // it is told as well
        call_off(fmt::format("group '{}': {}", options_.name, why), ErrorKind::invalid_input);
      }
      connections_[static_cast<std::size_t>(received->message.rank)] = std::move(socket);
      members.push_back(*received);
      ++came;
    }
    if (failed) call_off(failed->what(), failed->kind());
    Message first = own;
    try {
      if (options_.nccl) first.id = id_ = backend.communicator_id();
    } catch (const Error& error) {
      call_off(fmt::format("group '{}', rank 0: {}", options_.name, error.what()), error.kind());
    }
    for (const auto& to : members) {
      const Socket& socket = connections_[static_cast<std::size_t>(to.message.rank)];
      bool sent = send_message(socket, first, shared_descriptor(own_->handle().descriptor));
      for (const auto& member : members)
        if (member.message.rank != to.message.rank)
          sent = sent && send_message(socket, member.message, shared_descriptor(member.descriptor));
      if (!sent) lost_while_meeting(to.message.rank);
    }
    try {
      for (const auto& member : members) open_memory(backend, member);
    } catch (const Error& error) {
      call_off(fmt::format("group '{}', rank 0: {}", options_.name, error.what()), error.kind());
    }
  }

  /// The next connection of a rank, if one comes in time.
  std::optional<PendingConnections::Introduced> next_of(PendingConnections& pending) {
    try {
      return pending.next(deadline_);
    } catch (const Error& error) {
      call_off(cannot_meet(options_.name, error.what()), error.kind());
    }
  }

  /// Another rank: finds rank 0, and takes all handles; or tells it why this rank has no memory.
  void join(Backend& backend, const std::optional<Error>& failed) {
    const Address address(options_.name);
    Socket socket;
    for (;;) {
      socket = address.open();
      if (!socket) refuse(cannot_meet(options_.name, reason()));
      if (::connect(socket.get(), address.get(), address.bytes) == 0) break;
      if (Clock::now() > deadline_ && failed) throw *failed;
      if (Clock::now() > deadline_)
        refuse(fmt::format("group '{}': rank 0 did not come within {} s: start all ranks",
                           options_.name, seconds()));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (!is_own_user(address, socket.get()))
      refuse(fmt::format("group '{}': rank 0 is a process of another user", options_.name));
    connections_[0] = std::move(socket);
    if (failed) {
      send_message(connections_[0], failure_of(*failed));
      throw *failed;
    }
    if (!send_message(connections_[0], hello(backend),
                      shared_descriptor(own_->handle().descriptor)))
      lost_while_meeting(0);
    for (int count = 1; count < options_.ranks; ++count) {
      const Received member = next(0, Kind::hello);
      if (member.message.rank < 0 || member.message.rank >= options_.ranks ||
          member.message.rank == options_.rank)
        refuse(fmt::format("group '{}': rank 0 sent a wrong rank", options_.name));
      try {
        open_memory(backend, member);
      } catch (const Error& error) {
        call_off(fmt::format("group '{}', rank {}: {}", options_.name, options_.rank, error.what()),
                 error.kind());
      }
    }
  }

  /// Until the memory of all ranks is mapped and written by all.
  void agree() {
    if (options_.rank == 0) {
      for (int rank = 1; rank < options_.ranks; ++rank) next(rank, Kind::ready);
      for (int rank = 1; rank < options_.ranks; ++rank)
        send_message(connections_[static_cast<std::size_t>(rank)], {.kind = Kind::go});
    } else {
      send_message(connections_[0], {.kind = Kind::ready, .rank = options_.rank});
      next(0, Kind::go);
    }
  }

  /// The next message of a rank while the group meets.
  Received next(int rank, Kind kind) {
    const Socket& socket = connections_[static_cast<std::size_t>(rank)];
    if (!wait_readable(socket.get(), deadline_))
      call_off(fmt::format("group '{}': rank {} stopped answering within {} s", options_.name, rank,
                           seconds()));
    const auto received = receive_message(socket);
    if (received && received->message.kind == Kind::failure) {
      const Error error = error_of(received->message);
      if (options_.rank == 0) call_off(error.what(), error.kind());
      throw error;
    }
    if (received && received->other_version) call_off(another_version(), ErrorKind::invalid_input);
    if (!received && options_.rank != 0 && kind == Kind::hello)
      call_off(
          fmt::format("group '{}': rank 0 died while the group was made, or it is of another "
                      "group of this name: give each group a name of its own",
                      options_.name));
    if (!received || received->message.kind != kind) lost_while_meeting(rank);
    return *received;
  }

  std::string another_version() const {
    return fmt::format("group '{}': the ranks have several versions of fftune: give all the same",
                       options_.name);
  }

  [[noreturn]] void lost_while_meeting(int rank) {
    call_off(fmt::format("group '{}': rank {} died while the group was made", options_.name, rank));
  }

  /// Descriptors go to processes of this host alone.
  int shared_descriptor(int descriptor) const { return over_network_ ? -1 : descriptor; }

  void communicator_of(const CommunicatorOptions& options, Backend& backend) {
    std::shared_ptr<Communicator> made = backend.communicate(options);
    const std::lock_guard lock(values_mutex_);
    communicator_ = std::move(made);
  }

  bool is_lost() {
    const std::lock_guard lock(values_mutex_);
    return lost_ != 0;
  }

  double seconds() const { return std::chrono::duration<double>(options_.timeout).count(); }

  /// The next value that a rank sent, which the watching thread receives.
  double next_value(int rank) {
    std::unique_lock lock(values_mutex_);
    auto& values = values_[static_cast<std::size_t>(rank)];
    // A rank that left does not end the wait for another one.
    const auto& own_end = ends_[static_cast<std::size_t>(rank)];
    const auto end = [&] { return own_end != 0 ? own_end : lost_; };
    came_.wait_for(lock, options_.timeout, [&] { return !values.empty() || end() != 0; });
    if (values.empty()) {
      const std::uint32_t gone = end();
      throw Error(
          ErrorKind::device_fault,
          fault_text(gone != 0 ? gone : fault_code(GroupFault::timeout, rank), options_.timeout));
    }
    const double value = values.front();
    values.pop_front();
    return value;
  }

  /// The thread that receives values, learns that a rank is gone, and tells kernels and other
  /// ranks.
  void watch() {
    std::vector<pollfd> entries{{stop_.get(), POLLIN, 0}};
    std::vector<std::size_t> ranks{0};
    for (std::size_t rank = 0; rank < connections_.size(); ++rank)
      if (connections_[rank]) {
        entries.push_back({connections_[rank].get(), POLLIN, 0});
        ranks.push_back(rank);
      }
    for (;;) {
      const int found = ::poll(entries.data(), entries.size(), until_end());
      if (found < 0 && errno != EINTR) return;
      if (entries[0].revents != 0) return;
      end_sums();
      for (std::size_t i = 1; i < entries.size(); ++i) {
        if (found <= 0 || entries[i].revents == 0) continue;
        const auto received = receive_message(connections_[ranks[i]]);
        const std::lock_guard lock(values_mutex_);
        came_.notify_all();
        if (received && !received->other_version && received->message.kind == Kind::value) {
          values_[ranks[i]].push_back(received->message.value);
          continue;
        }
        Message gone{.kind = Kind::gone, .rank = static_cast<std::int32_t>(ranks[i])};
        gone.fault = fault_code(GroupFault::lost, static_cast<int>(ranks[i]));
        if (received && received->message.kind == Kind::gone) gone = received->message;
        std::uint32_t none = 0;
        std::atomic_ref<std::uint32_t> notice(own_->notices()[1]);
        const std::uint32_t left = fault_code(GroupFault::left, gone.rank);
        if (gone.rank >= 0 && gone.rank < options_.ranks)
          ends_[static_cast<std::size_t>(gone.rank)] = gone.fault;
        if (gone.fault != left) lost_ = gone.fault;
        // Sums that wait for it would never end. One that left may have left behind the last one.
        end_at_ = std::min(
            end_at_,
            Clock::now() + (gone.fault == left ? options_.timeout : std::chrono::milliseconds(0)));
        if (!notice.compare_exchange_strong(none, gone.fault) && gone.fault != left)
          notice.store(gone.fault);
        if (options_.rank == 0)
          for (std::size_t other = 1; other < connections_.size(); ++other)
            if (other != ranks[i] && connections_[other]) send_message(connections_[other], gone);
        // Nothing more comes from it, but its end.
        if (!received || gone.rank == static_cast<std::int32_t>(ranks[i])) entries[i].fd = -1;
      }
    }
  }

  /// Milliseconds until the communicator is ended, or -1.
  int until_end() {
    const std::lock_guard lock(values_mutex_);
    if (!communicator_ || end_at_ == Clock::time_point::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_at_ - Clock::now());
    return static_cast<int>(std::clamp<long>(left.count(), 0, 1 << 30));
  }

  void end_sums() {
    std::shared_ptr<Communicator> sums;
    {
      const std::lock_guard lock(values_mutex_);
      if (Clock::now() < end_at_) return;
      end_at_ = Clock::time_point::max();
      sums = communicator_;
    }
    if (sums) sums->end();
  }

  GroupOptions options_;
  Clock::time_point deadline_;
  bool over_network_;
  GroupTable table_;
  CommunicatorOptions::Id id_ = {};
  int forks_ = fork_count();
  std::unique_ptr<SharedBuffer> own_;
  std::vector<std::unique_ptr<Buffer>> opened_;  // by rank
  std::vector<Socket> connections_;              // by rank: rank 0's to all, others' to rank 0
  Socket stop_;
  std::mutex values_mutex_;
  std::condition_variable came_;
  std::vector<std::deque<double>> values_;  // by rank, received and not read yet
  std::vector<std::uint32_t> ends_;         // by rank: why it is gone; 0: it is there
  std::uint32_t lost_ = 0;                  // the last rank that died
  Clock::time_point end_at_ = Clock::time_point::max();
  std::shared_ptr<Communicator> communicator_;
  std::thread watcher_;
};

Group::Group(Backend& backend, const GroupOptions& options) {
  const auto require = [](bool holds, const std::string& why) {
    if (!holds) throw Error(ErrorKind::invalid_input, why);
  };
  require(options.ranks >= 1 && options.ranks <= GroupTable::most_ranks,
          fmt::format("ranks is {}: a group has 1 to {}", options.ranks, GroupTable::most_ranks));
  require(options.rank >= 0 && options.rank < options.ranks,
          fmt::format("rank is {}: use 0 to {}", options.rank, options.ranks - 1));
  const bool is_path = options.name.starts_with('/');
  const bool is_tcp = options.name.starts_with(tcp_scheme);
  const std::size_t most = is_path  ? sizeof(sockaddr_un::sun_path) - 1
                           : is_tcp ? sizeof(Message::group) - 1
                                    : 90;
  require(!options.name.empty() && options.name.size() <= most,
          fmt::format("the group's name has {} bytes: use 1 to {}{}", options.name.size(), most,
                      is_path ? " for the path of a socket" : ", or a path"));
  require(std::none_of(options.name.begin(), options.name.end(),
                       [](unsigned char c) { return std::iscntrl(c) != 0; }),
          "the group's name has a control character: leave it out");
  require(
      is_path || is_tcp || options.name.find('/') == std::string::npos,
      fmt::format("group '{}' is no absolute path: begin the path of a socket with a slash, and "
                  "leave slashes out of another name",
                  options.name));
  require(options.max_bytes >= 1 && options.max_bytes <= std::uint64_t{1} << 36,
          fmt::format("max_bytes is {}: use the bytes of the largest message", options.max_bytes));
  // A deadline and the nanoseconds of the devices' waits must have room for it.
  constexpr std::chrono::milliseconds longest = std::chrono::hours(24 * 365);
  require(options.timeout.count() >= 1 && options.timeout <= longest,
          fmt::format("timeout is {} ms: use 1 to {}, a year", options.timeout.count(),
                      longest.count()));
  require(options.nccl || !is_tcp,
          fmt::format("group '{}' is one across hosts: give it NCCL", options.name));
  members_ = std::make_unique<Members>(backend, options);
  members_->communicate(backend);
}

Group::~Group() = default;

void* Group::memory() const {
  return members_->memory();
}

int Group::rank() const {
  return members_->options().rank;
}

int Group::ranks() const {
  return members_->options().ranks;
}

double Group::largest(double value) const {
  return members_->largest(value);
}

void Group::check() const {
  members_->check();
}

}  // namespace fftune
