"""SGLang's models, capturing: a package for `SGLANG_EXTERNAL_MODEL_PACKAGE`, which SGLang searches for model classes.

`capturing_models` gives SGLang every one of its own classes that can capture for EAGLE-3, switched on; `forward_writer`
writes what they captured, one file per forward. Runs inside SGLang: imports SGLang, torch, safetensors and the standard
library only. Empty otherwise, so that reading a file's layout does not import SGLang.
"""
