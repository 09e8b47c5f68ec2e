// The times that a record states: of the winner, fresh, beside the baselines, on a quiet device.
#pragma once

#include "store/record.hpp"
#include "tuning/decide/end_to_end.hpp"
#include "tuning/measure/statistics.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// Times the winner with fresh samples beside the baselines; false if that failed. The winner is
/// the sentinel too: if it does not take what it took before (a median of 0: not known), or if
/// something disturbs the device, that is waited for and the times are taken again; what does not
/// go away is stated as the verdict's disturbances.
bool time_winner(Session& session, const EndToEnd& winner, Summary before, Verdict& verdict,
                 TuneResult& result);

}  // namespace fftune
