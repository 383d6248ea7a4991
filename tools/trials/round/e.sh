# C examples on the GPU, beside the soak
. .fin/lib.sh
cp .fin/*.py .fin/*.sh /tmp/; dsl; cd $T
python3 -m cutlass_py_attn doctor 2>&1 | tail -15 | cut -c1-160
time timeout 150 python3 -m cutlass_py_attn export --library --arch sm_90,sm_90a -o /tmp/lib --problem bf16_d128_n512x512,256_h32k8_causal_br_paged16 --problem bf16_d128_q1_s8192_b8_h32k8_full_paged16 --problem bf16_d128_q4_s8192_b8_h32k8_causal_br_paged16 --problem append_bf16_d128 --problem merge_bf16_d128 --problem bf16_d128_s4096_b1_h32k8_causal --problem bf16_d128_s4096_b1_h32k8_full > /tmp/o/export.log 2>&1; tail -2 /tmp/o/export.log | cut -c1-300
CUDA=$(python3 -c "from cuda.pathfinder import find_nvidia_header_directory as f; print(f('cudart') or '/usr/local/cuda/include')")
gcc -std=c11 -O2 -I /tmp/lib -I $CUDA examples/serving_c/main.c /tmp/lib/attention.c -l:libcuda.so.1 -ldl -lpthread -lm -o /tmp/serving_c && (timeout 60 /tmp/serving_c; timeout 60 /tmp/serving_c 7 333 16 4 64) 2>&1 | tee /tmp/o/serving_c.txt | cut -c1-150
gcc -std=c11 -O2 -I /tmp/lib -I tests/support/fake_nccl_library -I $CUDA examples/context_parallel_c/main.c tests/support/fake_nccl_library/nccl.c /tmp/lib/attention.c -l:libcuda.so.1 -ldl -lpthread -lm -o /tmp/cp_c && (timeout 60 /tmp/cp_c 1 200 4 2; timeout 60 /tmp/cp_c 4 150 8 2) 2>&1 | tee /tmp/o/cp_c.txt | cut -c1-150
tail -2 /tmp/o/soak.log
