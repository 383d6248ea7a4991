. .fin/lib.sh
cp .fa4/part1 /tmp/s/; cat /tmp/s/part0 /tmp/s/part1 | tar -xJ -C /tmp; dsl; cd $T; date +%T
python3 /tmp/build_all.py shown 16 > /tmp/o/shown.log 2>&1; tail -2 /tmp/o/shown.log
python3 /tmp/build_all.py bench 16 > /tmp/o/bench_build.log 2>&1; tail -2 /tmp/o/bench_build.log
for i in $(seq 120); do [ $(grep -c "^[a-z0-9]* [0-9]*$" /tmp/o/union.log) = 4 ] && break; sleep 1; done; cat /tmp/o/union.log; date +%T
python3 /tmp/build_all.py rest 16 > /tmp/o/rest.log 2>&1; tail -2 /tmp/o/rest.log; grep FAILED /tmp/o/rest.log | head -5; date +%T
( OMP_NUM_THREADS=3 timeout 260 python3 -m tools.release.verify_gpu --kernels /tmp/shown --output /tmp/o/verified.jsonl > /tmp/o/verify.log 2>&1; echo verify rc $?; tail -1 /tmp/o/verify.log | cut -c1-300 ) &
V=$!
timeout 260 python3 -m tools.release.fuzz --kernels /tmp/k --processes 14 --record /tmp/o/features.json > /tmp/o/fuzz.log 2>&1; echo fuzz rc $?; tail -12 /tmp/o/fuzz.log | cut -c1-330; wait $V; date +%T
tar -C /tmp -cJf $OUT/o.tar.xz o; tar -C $T -cJf $OUT/ptx.tar.xz ptx; tar -C /tmp -cf - k | xz -T8 -2 > $OUT/k.tar.xz; ls -la $OUT/k.tar.xz
