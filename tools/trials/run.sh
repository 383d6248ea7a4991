# In a folder with the contents of tree.tar.xz and kernels.tar.xz. OUTDIR: where log.txt and err.txt go. Stops itself after 88 s.
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OUTDIR=${OUTDIR:-$PWD}
export CHECK_S=${CHECK_S:-28} ALL_S=${ALL_S:-76} ROUNDS=${ROUNDS:-2}
timeout 88 python3 run1.py 2> $OUTDIR/err.txt
echo rc $?; tail -c 1500 $OUTDIR/err.txt
