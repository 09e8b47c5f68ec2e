#include "apps/fftune/log.hpp"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

#include "apps/fftune/terminal.hpp"

namespace fftune::tool {

namespace {

class StderrSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  StderrSink(bool live, bool no_color) : terminal_(live), color_(live && !no_color) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    std::string line;
    // A live progress line may stand there; it is drawn again below.
    if (terminal_) line += clear_line;
    if (message.level >= spdlog::level::err)
      line += styled("error: ", Style::bad, color_);
    else if (message.level == spdlog::level::warn)
      line += styled("warning: ", Style::caution, color_);
    line += shown({message.payload.data(), message.payload.size()}) + "\n";
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
  void flush_() override { std::fflush(stderr); }

 private:
  bool terminal_;
  bool color_;
};

}  // namespace

void start_log(const Output& output, bool no_color) {
  auto logger = std::make_shared<spdlog::logger>(
      "fftune", std::make_shared<StderrSink>(output.live(), no_color));
  logger->set_level(output.quiet()     ? spdlog::level::err
                    : output.verbose() ? spdlog::level::debug
                                       : spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace fftune::tool
