// The times of a record: fresh samples of the winner and the baselines, on an undisturbed device.
#pragma once

#include "store/record.hpp"
#include "tuning/decide/end_to_end.hpp"
#include "tuning/measure/statistics.hpp"
#include "tuning/search/session.hpp"

namespace fftune {

/// Times the winner with fresh samples beside the baselines; false if that failed. The winner is
/// also the sentinel: if its time differs from `before` (a median of 0: not known), or something
/// disturbs the device, the measurement is repeated after a wait; disturbances that remain are
/// stated in the verdict.
bool time_winner(Session& session, const EndToEnd& winner, Summary before, Verdict& verdict,
                 TuneResult& result);

}  // namespace fftune
