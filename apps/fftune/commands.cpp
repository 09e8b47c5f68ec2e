// The table of commands.
#include "apps/fftune/command.hpp"
#include "apps/fftune/commands/all.hpp"

namespace fftune::tool {

const std::vector<AddCommand>& commands() {
  static const std::vector<AddCommand> table{
      add_tune,     // one command for each op, named after it
      add_devices,  //
      add_ops,      //
      add_list,     //
      add_check,    //
      add_bench,    //
      add_compile,  //
      add_bundle,   //
      add_refresh,  //
      add_presets,  //
      add_report,   //
      add_worker,   // hidden
  };
  return table;
}

}  // namespace fftune::tool
