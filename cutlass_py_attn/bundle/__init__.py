"""Bundle: kernels in a folder that hosts without Python launch: cubins, PTX, manifest.json and a C header."""
