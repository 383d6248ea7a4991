"""Correctness of every kernel against float64 on small problems, then timings of base and variants in turns."""
import os, sys, time, math, traceback
START = time.time()
DRY = bool(os.environ.get("DRY"))
import numpy as np, torch
import ml_dtypes
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.bench import timing
from cutlass_py_attn.plan import abi
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor
from cutlass_py_attn.runtime import params
from cutlass_py_attn.testing import guarded_check
from cutlass_py_attn.testing.cases import Case
import rows
CHECK_S, ALL_S, ROUNDS = float(os.environ.get("CHECK_S", 25)), float(os.environ.get("ALL_S", 78)), int(os.environ.get("ROUNDS", 3))
OUT = open(os.path.join(os.environ.get("OUTDIR", "."), "log.txt"), "w")
def say(*a): print(*a, flush=True); print(*a, file=OUT, flush=True)
DEV = "cpu" if DRY else "cuda"
if DRY:
    class Fake:
        def __init__(self, plan): self.plan, self.workspace_bytes = plan, plan.workspace.bytes
        def __call__(self, *a, **k): pass
    def bind(artifact, plan, problem=None): return Fake(plan)
else:
    from cutlass_py_attn.runtime.launch import bind
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int32": torch.int32}
def names(problem):
    lse = Tensor.contiguous(problem.shape.logsumexp, "float32")
    return {**problem.tensors(), **problem.vectors(), "logsumexp": lse}
def bound_of(row, problem, variant, num_sms=132):
    label, tile, family, folder = variant
    plan = rows.plan_of((row, problem), tile, family, num_sms)
    return bind(Folder("kernels/" + folder)(plan.build), plan, problem)
def extent(t): return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.strides, strict=True) if n)
def to_torch(a):
    if a.dtype == ml_dtypes.bfloat16: return torch.from_numpy(np.ascontiguousarray(a).view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(a).copy())
def check(row, variant, line, num_sms):
    case = Case.parse(line); problem = case.problem(); e = EXPECTED.get(line) or EXPECTED.setdefault(line, guarded_check.expect(case))
    b = bound_of(row, problem, variant, num_sms)
    held, at = {}, {}
    for name, t in names(problem).items():
        filler = float("nan") if "int" not in t.dtype else 1 << 30
        buffer = torch.full((extent(t) + 512,), filler, dtype=TYPES[t.dtype])
        view = torch.as_strided(buffer, t.shape, t.strides, 256)
        if name in e.arrays: view.copy_(to_torch(e.arrays[name]).reshape(t.shape))
        held[name] = buffer.to(DEV); at[name] = held[name].data_ptr() + 256 * buffer.element_size()
    ws = torch.full((b.workspace_bytes + 16,), 255, dtype=torch.uint8, device=DEV)
    for n in ("query",): assert at[n] % 16 == 0
    found, differ = None, 0
    for _ in range(4):
        b(at, 0, workspace=ws.data_ptr() if b.workspace_bytes else None)
        if not DRY: torch.cuda.synchronize()
        got = {}
        for name in ("output", "logsumexp"):
            t = names(problem)[name]; host = held[name].cpu()
            v = torch.as_strided(host, t.shape, t.strides, 256)
            got[name] = v.float().numpy().astype(np.float32).reshape(t.shape)
            assert torch.isnan(host[:256]).all() and torch.isnan(host[256 + extent(t):]).all(), name + ": written outside"
        if found is None: found = got
        differ += any(not np.array_equal(found[n], got[n], equal_nan=True) for n in got)
    r = guarded_check.ratios(case, e, found)
    return r, differ
EXPECTED = {}
def check_all():
    bad = good = 0; seen = set()
    todo = [(n, row, variant, *line) for row, variants in rows.ROWS for variant in variants for n, line in enumerate(rows.small(row))]
    for _, row, variant, line, sms in sorted(todo, key=lambda it: it[0]):
        if os.environ.get("ONLY", "") in row:
            if True:
                if time.time() - START > CHECK_S: say(f"check: stopped at {row} {variant[0]}"); say(f"checked: {good} good, {bad} BAD"); return
                key = (rows.plan_of((row, Case.parse(line).problem()), variant[1], variant[2], sms).build.digest, variant[3], line)
                if key in seen: continue
                seen.add(key)
                try:
                    r, differ = check(row, variant, line, sms)
                    ok = max(r.values()) <= 1 and not differ
                except BaseException as error:
                    r, differ, ok = f"{type(error).__name__} {str(error)[:200]}", 0, False
                    traceback.print_exc(limit=2, file=sys.stderr)
                    if "illegal" in str(error).lower() or "launch fail" in str(error).lower(): raise
                good, bad = good + ok, bad + (not ok)
                if not ok or DRY: say("" if DRY else "BAD", row, variant[0], line, r, "launches that differ:", differ)
    say(f"checked: {good} good, {bad} BAD ({time.time() - START:.1f} s)")
class Data:
    """Inputs of a row on the GPU, N(0, 1) of fixed seed; a random table of pages."""
    def __init__(self, row):
        self.factor = float(row.split("*")[1]) if "*" in row else 1.0
        self.spec = parse(row.split()[0]); self.problem = p = self.spec.problem("forward"); self.held, self.at = {}, {}
        g = torch.Generator(device=DEV).manual_seed(1)
        for name, t in names(p).items():
            n = extent(t)
            if t.dtype == "int32":
                if name in ("cu_seqlens_q", "cu_seqlens_k"):
                    x = np.concatenate([[0], np.cumsum([s.num_queries for s in self.spec.sequences])]).astype(np.int32)
                elif name == "seqused_k": x = np.full(t.shape, self.spec.num_keys, np.int32)
                else:
                    pages = p.key.shape[0]; b, m = t.shape
                    x = np.random.default_rng(0).permutation(pages - 1)[: b * m].astype(np.int32).reshape(b, m) if pages - 1 >= b * m else np.arange(b * m, dtype=np.int32).reshape(b, m) % pages
                v = torch.from_numpy(np.ascontiguousarray(x)).to(DEV).reshape(-1)
            elif DRY: v = torch.zeros(16, dtype=TYPES[t.dtype])
            elif t.dtype == "float32": v = torch.empty(n, dtype=torch.float32, device=DEV)
            else:
                v = torch.empty(n, dtype=TYPES[t.dtype], device=DEV)
                for i in range(0, n, 1 << 26): v[i : i + (1 << 26)].normal_(generator=g)
                if name == "query" and self.factor != 1: v *= self.factor
            self.held[name] = v; self.at[name] = v.data_ptr()
    def flops(self): return self.spec.flops
def graph_of(b, data, calls):
    ws = torch.zeros(max(b.workspace_bytes, 16), dtype=torch.uint8, device=DEV); wp = ws.data_ptr() if b.workspace_bytes else None
    if DRY: return (lambda: None), ws
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        for _ in range(2): b(data.at, s.cuda_stream, workspace=wp)
    s.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=s):
        for _ in range(calls): b(data.at, torch.cuda.current_stream().cuda_stream, workspace=wp)
    return g, ws
def agree(data, first, runs):
    """Largest difference of the output from the base's, relative L2 of a sample."""
    return
def time_all():
    stream = 0 if DRY else torch.cuda.current_stream().cuda_stream
    for row, variants in rows.ROWS:
        if time.time() - START > ALL_S: say("stopped before", row); return
        try: data = Data(row)
        except BaseException as error: say(row, type(error).__name__, str(error)[:200]); continue
        calls = 10 if "_b1_" in row else 1
        runs, base_out = [], None
        for v in variants:
            try:
                b = bound_of(row, data.problem, v)
                g, ws = graph_of(b, data, calls)
                difference = 0.0
                if not DRY:
                    data.held["output"].zero_(); g.replay(); torch.cuda.synchronize()
                    sample = data.held["output"][: 1 << 22].float()
                    if base_out is None: base_out = sample.clone()
                    difference = float((sample - base_out).norm() / base_out.norm())
                runs.append((v[0], g, ws, difference, []))
            except BaseException as error:
                say(row, v[0], type(error).__name__, str(error)[:300]); traceback.print_exc(limit=2, file=sys.stderr)
        for _ in range(ROUNDS):
            for label, g, ws, _, found in runs:
                replay = (lambda: time.sleep(0.001)) if DRY else g.replay
                if DRY: found.append(1.0); continue
                found.append(timing.median(replay, stream, timing.SAMPLES) / calls)
        if not runs: continue
        base = sorted(runs[0][4])[len(runs[0][4]) // 2]
        decode = "_q1_" in row or "_q16_" in row
        say(f"{row}  (clock {None if DRY else timing.sm_clock_mhz()}, {time.time() - START:.0f} s)")
        for label, _, _, difference, found in runs:
            ms = sorted(found)[len(found) // 2]
            flops = 4.0
            rate = f"{ms * 1e3:8.1f} us" if decode else f"{rate_of(data, ms):7.1f} TFLOP/s"
            say(f"   {label:34s} {rate}  x{base / ms:.3f}   [{min(found) * 1e3:.1f} .. {max(found) * 1e3:.1f} us]  difference {difference:.1e}")
        del data, runs, base_out
        if not DRY: torch.cuda.empty_cache()
def rate_of(data, ms):
    f = data.spec.flops
    f = f("forward") if callable(f) else f
    return f / ms / 1e9
say("device", "dry" if DRY else torch.cuda.get_device_name(0))
check_all()
time_all()
say(f"total {time.time() - START:.1f} s")
