"""llama.cpp's own converter on one of our folders: run_llama.py CONVERTER FOLDER OUTPUT.gguf NPZ.

CONVERTER is the unpacked source of llama.cpp. A made-up model has no tokenizer that the converter
knows, so the vocabulary is left out; everything about tensors is the converter's own work. Prints
how many tensors came out as MXFP4, and saves their bytes.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import json
import runpy
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, str(Path(sys.argv[1]) / "gguf-py"))

import gguf
import numpy as np
from conversion.gpt_oss import GptOssModel

converter, folder, output, arrays = sys.argv[1:]
GptOssModel.set_vocab = lambda self: None  # type: ignore[method-assign]
sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", output, "--outtype", "bf16"]
runpy.run_path(str(Path(converter) / "convert_hf_to_gguf.py"), run_name="__main__")

kind = gguf.GGMLQuantizationType.MXFP4
tensors = [t for t in gguf.GGUFReader(output).tensors if t.tensor_type == kind]
np.savez(arrays, **{t.name: np.asarray(t.data) for t in tensors})
print(json.dumps({"mxfp4": len(tensors)}))
