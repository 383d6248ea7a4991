# $1: seconds of the soak, $2: seconds that this command may take
. .fin/lib.sh
S=$(date +%s); cp .fin/*.py .fin/*.sh /tmp/; dsl; cd $T
while pgrep -f "build_all.py rest" > /dev/null && [ $(( $(date +%s) - S )) -lt 200 ]; do sleep 1; done; tail -4 /tmp/o/rest.log; grep -c FAILED /tmp/o/rest.log
setsid nohup python3 -m tools.race.soak --seconds $1 --threads 8 --kernels /tmp/k --record /tmp/o/soak.jsonl --shared > /tmp/o/soak.log 2>&1 &
( OMP_NUM_THREADS=4 timeout 300 python3 -m tools.release.verify_gpu --kernels /tmp/shown --output /tmp/o/verified.jsonl > /tmp/o/verify.log 2>&1; echo verify rc $?; tail -4 /tmp/o/verify.log | cut -c1-300 ) &
V=$!
timeout 300 python3 -m tools.release.fuzz --kernels /tmp/k --processes 12 --record /tmp/o/features.json > /tmp/o/fuzz.log 2>&1; echo fuzz rc $?; tail -25 /tmp/o/fuzz.log | cut -c1-330; wait $V; date +%T
tar -C /tmp -cJf $OUT/o.tar.xz o
