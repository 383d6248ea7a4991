"""build_all.py WHAT PROCESSES: shown | features | bench | rest, with the DSL of /tmp/site; kernels to /tmp/k."""
import pickle, sys, time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
def one(choices):
    import tools.release.build_ptx as b
    try: return b._cached(choices)
    except Exception as error: return f"{choices[0].symbol}: {type(error).__name__}: {str(error)[:300]}"
def read(part): return pickle.loads(Path(f"/tmp/part_{part}.pickle").read_bytes())
if __name__ == "__main__":
    import tools.release.build_ptx as b
    from cutlass_py_attn.artifact import Folder
    what, processes = sys.argv[1], int(sys.argv[2])
    b.PROCESSES = processes
    start = time.time()
    if what == "shown":
        sys.argv = ["build_ptx", "-o", "/tmp/shown"]; b.main()
    elif what == "features":
        sys.argv = ["build_ptx", "--features"]; b.main()
    else:
        needed = list(dict.fromkeys(read("bench") if what == "bench" else [c for p in ("fuzz", "sm90", "sm80") for c in read(p)]))
        if what == "rest":
            done = set(read("bench")); needed = [c for c in needed if c not in done]
            b.build_new_term(Path("/tmp/k"))
        bad = n = 0
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            for future in as_completed([pool.submit(one, c) for c in needed]):
                made = future.result(); n += 1
                if isinstance(made, str): bad += 1; print("FAILED", made, flush=True); continue
                Folder(Path("/tmp/k")).put(made if made.build.arch == b.PTX_ARCH else replace(made, ptx=""))
                if n % 50 == 0: print(n, len(needed), f"{time.time() - start:.0f} s", flush=True)
        print(f"{n} kernels, {bad} failed")
    print(what, f"{time.time() - start:.0f} s", flush=True)
