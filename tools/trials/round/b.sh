. .fin/lib.sh
cp .fin/*.py .fin/*.sh /tmp/; cp .fa4/part1 /tmp/s/; cat /tmp/s/part0 /tmp/s/part1 | tar -xJ -C /tmp; dsl; cd $T; date +%T
python3 /tmp/build_all.py shown 16 > /tmp/o/shown.log 2>&1; tail -2 /tmp/o/shown.log
python3 /tmp/build_all.py bench 16 > /tmp/o/bench_build.log 2>&1; grep -v "^[0-9]* [0-9]*" /tmp/o/bench_build.log | tail -8; date +%T
setsid nohup taskset -c 6-15 python3 /tmp/build_all.py rest 10 > /tmp/o/rest.log 2>&1 &
timeout ${1:-400} taskset -c 0-5 python3 -m cutlass_py_attn bench --kernels /tmp/k -o /tmp/o/h200.json --compare $T/tools/bench/results/h200.json > /tmp/o/bench.txt 2> /tmp/o/bench.err; echo bench rc $?
tail -30 /tmp/o/bench.txt | cut -c1-180; tail -3 /tmp/o/bench.err; tail -3 /tmp/o/rest.log; date +%T
tar -C /tmp -cJf $OUT/o.tar.xz o; tar -C $T -cJf $OUT/ptx.tar.xz ptx
