T=/tmp/tree
export PYTHONPATH=$T OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=/tmp/cache
dsl() { export PYTHONPATH=$T:/tmp/site:/tmp/site/nvidia_cutlass_dsl/dsl_packages; }
