"""The command line as a program: `python -m cutlass_py_attn` is `cutlass-py-attn`."""

from cutlass_py_attn.cli.main import main

if __name__ == "__main__":
    main()
