"""union1.py PART: pickles the choices of every kernel of one part of a GPU round."""
import pickle, sys
from pathlib import Path
from tools.release import build_ptx, fuzz
part = sys.argv[1]
if part == "bench":
    from cutlass_py_attn.bench import cases
    from cutlass_py_attn.problem import spec
    found = cases.builds(map(spec.parse, cases.default_cases()), (9, 0))
elif part == "short":
    from tools.bench import short_map
    found = []
elif part == "fuzz":
    from cutlass_py_attn.testing import random_cases as r
    numbers = [*range(0, fuzz.VARIANTS), *range(r.PAGED_FROM, r.PAGED_FROM + fuzz.PAGED), *range(r.MLA_FROM, r.MLA_FROM + fuzz.MLA), *range(r.E4M3_FROM, r.E4M3_FROM + fuzz.E4M3)]
    found = fuzz.needed(numbers, fuzz.RUNS, fuzz.FAMILIES)
else:
    from cutlass_py_attn.testing import suite
    found = build_ptx.of_family(part, suite.builds)
Path(f"/tmp/part_{part}.pickle").write_bytes(pickle.dumps(list(found)))
print(part, len(found), flush=True)
