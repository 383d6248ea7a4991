import sys, time
from dataclasses import replace
from cutlass_py_attn.artifact import Folder
from cutlass_py_attn.compilation.compiler import compile, artifact_for
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.problem.spec import parse
from cases import CASES
out = Folder("./kernels")
for name, (tile, variants) in CASES.items():
    for v in variants:
        t = time.time()
        pr = parse(name).problem("backward")
        text = tile + (f"+trial_{v}" if v != "base" else "")
        try:
            b = planner.plan_with_tile(pr, "sm_90a", TileConfig.parse(text)).build
            if v == "base": assert b == planner.plans_on(pr, (9, 0), 132)[0].build, name
            if "f" in v and list(__import__("pathlib").Path("./kernels").rglob(b.symbol + ".cubin")): print("kept", b.symbol); continue
            a = compile(b); out.put(replace(a, ptx=""))
            open(f"./t/{b.symbol}_k{b.key_stages}.ptx", "w").write(a.ptx)
            print(b.symbol, text, a.registers, f"{time.time()-t:.0f} s", flush=True)
        except Exception as e: print("FAILED", name, v, str(e)[:300], flush=True)
    pr = parse(name).problem("forward")
    fb = planner.plans_on(pr, (9, 0), 132)[0].build
    if list(__import__("pathlib").Path("./kernels").rglob(fb.symbol + ".cubin")): continue
    a = compile(fb); out.put(replace(a, ptx="")); print(a.build.symbol, flush=True)
