from pathlib import Path
import tools.release.build_ptx as b
from tools.race import stress
if __name__ == "__main__":
    b.PROCESSES = 10
    for t in ("_wide_", "_mla_", "_e4m3_"): stress.build(Path("/tmp/stress"), t)
