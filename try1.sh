#!/bin/bash
set -u
R=${OUT:-/tmp/out}; O=/tmp/o; mkdir -p $O
(time (cmake --preset ci && ninja -C build/ci -k 0)) > $R/build.log 2>&1; echo build rc $?; grep -E "^FAILED|error:|warning:" $R/build.log | head -20; tail -3 $R/build.log
F=$PWD/build/ci/apps/fftune/fftune
$F --reference > $R/cli.md; cp $R/cli.md docs/cli.md
(time ctest --test-dir build/ci -j 12 --output-on-failure) > $O/ctest.txt 2>&1; echo ctest rc $?; tail -25 $O/ctest.txt
export FFTUNE_CACHE=/tmp/cache
./.ci/gpu tests > $O/gputests.txt 2>&1; echo gpu tests rc $?; grep -E "^== |test cases|All tests|FAILED:" $O/gputests.txt
for t in memcheck racecheck; do (time timeout 120 ./.ci/gpu $t) > $O/$t.txt 2>&1; echo $t rc $?; grep -E "SUMMARY|real|test cases|All tests" $O/$t.txt; done
(time timeout 150 $F compile --arch sm_90a,sm_80,sm_86,sm_89,sm_100a,sm_120a --jobs 16) > $O/compile.txt 2>&1; echo compile rc $?; tail -45 $O/compile.txt | cut -c1-150
tar czf $R/all.tgz -C /tmp o
