#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "core/error.hpp"
#include "cuda/session.hpp"

namespace fftune::cuda {
namespace {

/// A capture that is closed again whatever happens, since a stream left capturing is lost.
class Capture {
 public:
  Capture(const Driver& driver, CUstream stream) : driver_(driver), stream_(stream) {
    // Another thread may allocate or load a module meanwhile; this one may not.
    driver.check(driver.stream_begin_capture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                 "cuStreamBeginCapture");
  }
  ~Capture() {
    if (!open_) return;
    CUgraph graph = nullptr;
    if (driver_.stream_end_capture(stream_, &graph) == CUDA_SUCCESS && graph != nullptr)
      driver_.graph_destroy(graph);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  CUgraph end() {
    open_ = false;
    CUgraph graph = nullptr;
    driver_.check(driver_.stream_end_capture(stream_, &graph), "cuStreamEndCapture");
    return graph;
  }

 private:
  const Driver& driver_;
  CUstream stream_;
  bool open_ = true;
};

using Clock = std::chrono::steady_clock;

class GraphReplay final : public Replay {
 public:
  GraphReplay(std::shared_ptr<const Session> session, Owned<CUgraphExec> graph, int passes)
      : session_(std::move(session)),
        graph_(std::move(graph)),
        start_(make_event(session_->context())),
        end_(make_event(session_->context())),
        passes_(passes) {}

  double sample() override {
    const Current current(*session_->context());
    const Driver& driver = session_->driver();
    session_->enqueue_delay(std::clamp(2 * host_seconds_, shortest_delay, longest_delay));
    const auto begin = Clock::now();
    driver.check(driver.event_record(start_.get(), session_->stream()), "cuEventRecord");
    driver.check(driver.graph_launch(graph_.get(), session_->stream()), "cuGraphLaunch");
    driver.check(driver.event_record(end_.get(), session_->stream()), "cuEventRecord");
    host_seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();

    CUresult result = CUDA_ERROR_NOT_READY;
    while (result == CUDA_ERROR_NOT_READY) result = driver.event_query(end_.get());
    driver.check(result, "a captured sequence");
    float milliseconds = 0;
    driver.check(driver.event_elapsed_time(&milliseconds, start_.get(), end_.get()),
                 "cuEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3 / passes_;
  }

 private:
  // The host takes some ten microseconds to submit the events and the graph.
  static constexpr double shortest_delay = 30e-6;
  static constexpr double longest_delay = 2e-3;

  std::shared_ptr<const Session> session_;
  Owned<CUgraphExec> graph_;
  Owned<CUevent> start_;
  Owned<CUevent> end_;
  int passes_;
  double host_seconds_ = 50e-6;
};

}  // namespace

std::unique_ptr<Replay> capture(const std::shared_ptr<const Session>& session, int passes,
                                const std::function<void(int pass, void* stream)>& enqueue) {
  if (passes < 1) throw Error(ErrorKind::internal, fmt::format("a capture of {} passes", passes));
  const Driver& driver = session->driver();
  const SharedContext& context = session->context();
  const auto stream = make_stream(context);
  CUgraph raw_graph = nullptr;
  {
    Capture capture(driver, stream.get());
    for (int pass = 0; pass < passes; ++pass) enqueue(pass, stream.get());
    raw_graph = capture.end();
  }
  const Owned<CUgraph> graph(context, raw_graph, driver.graph_destroy);
  CUgraphExec raw_exec = nullptr;
  driver.check(driver.graph_instantiate(&raw_exec, graph.get(), 0), "cuGraphInstantiate");
  Owned<CUgraphExec> exec(context, raw_exec, driver.graph_exec_destroy);
  driver.check(driver.graph_upload(exec.get(), session->stream()), "cuGraphUpload");
  session->synchronize();
  return std::make_unique<GraphReplay>(session, std::move(exec), passes);
}

}  // namespace fftune::cuda
