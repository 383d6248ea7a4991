# tests/gpu alone on the card; $1: seconds
. .fin/lib.sh
cp .fin/*.py .fin/*.sh /tmp/; cd $T
pkill -TERM -f tools.race.soak; for i in $(seq 40); do pgrep -f tools.race.soak > /dev/null || break; sleep 1; done; tail -5 /tmp/o/soak.log | cut -c1-300
( time timeout ${1:-280} python3 -m pytest tests/gpu -n 8 -q --kernels /tmp/k -p no:cacheprovider -rf ) > /tmp/o/gpu.log 2>&1; grep -v "^[.sFE]* *\[" /tmp/o/gpu.log | tail -60 | cut -c1-330
tar -C /tmp -cJf $OUT/o.tar.xz o
