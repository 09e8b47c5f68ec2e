// The commands. Each adds itself to the command line.
#pragma once

namespace fftune::tool {

class CommandLine;

void add_tune(CommandLine& line);
void add_tune_presets(CommandLine& line);
void add_tune_vllm(CommandLine& line);
void add_devices(CommandLine& line);
void add_ops(CommandLine& line);
void add_list(CommandLine& line);
void add_check(CommandLine& line);
void add_bench(CommandLine& line);
void add_compile(CommandLine& line);
void add_bundle(CommandLine& line);
void add_refresh(CommandLine& line);
void add_presets(CommandLine& line);
void add_report(CommandLine& line);
void add_worker(CommandLine& line);

}  // namespace fftune::tool
