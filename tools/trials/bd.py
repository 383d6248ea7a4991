import sys,time,os,dataclasses
from pathlib import Path
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.tile_config import TileConfig
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.compilation.compiler import compile as compile_now
out=Path(os.environ.get("OUT","./var"))
for s in sys.argv[1:]:
    name,tile=s.split("=")
    pr=parse(name).problem("forward")
    base=TileConfig.of(planner.plan(pr,"sm_90a").build)
    t=TileConfig.parse(str(base)+tile) if tile.startswith(("-","+")) else TileConfig.parse(tile)
    try: b=planner.plan_with_tile(pr,"sm_90a",t,family="decode").build
    except Exception as e: print(s,str(e)[:600]); continue
    t0=time.time()
    try: made=compile_now(b)
    except Exception as e: print(s,type(e).__name__,str(e)[:1500]); continue
    (out/(b.symbol+".cubin")).write_bytes(made.cubin); (out/(b.symbol+".ptx")).write_text(made.ptx)
    m=made.main
    print(s, b.symbol, f"{time.time()-t0:.1f}s", "regs", m.registers, "frame", m.frame_bytes, "spill", m.spill_bytes, len(made.cubin), flush=True)
