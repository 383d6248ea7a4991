. .fin/lib.sh
cp .fin/*.py .fin/*.sh /tmp/; dsl; cd $T; S=$(date +%s)
cp /tmp/o/features.json ptx/features.json
( python3 /tmp/build_all.py features 6 > /tmp/o/features_build.log 2>&1; tail -2 /tmp/o/features_build.log ) &
F=$!
python3 /tmp/stress_build.py > /tmp/o/stress_build.log 2>&1
tail -2 /tmp/o/stress_build.log | cut -c1-300; wait $F; echo built $(( $(date +%s) - S )) s
timeout 30 python3 -m cutlass_py_attn bench --kernels /tmp/k --only e4m3 -o /tmp/o/e4m3.json 2>&1 | tail -8 | cut -c1-150
for t in _wide_ _mla_ _e4m3_; do timeout 60 python3 -m tools.race.stress --kernels /tmp/stress --only $t --record /tmp/o/stressed.jsonl 2>&1 | grep -v "\.\.\.$" | cut -c1-200; done; echo at $(( $(date +%s) - S )) s
tar -C /tmp -cJf $OUT/o.tar.xz o; tar -C $T -cJf $OUT/ptx.tar.xz ptx
