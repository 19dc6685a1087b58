"""SGLang's models, capturing: a package for `SGLANG_EXTERNAL_MODEL_PACKAGE`, which SGLang searches for model classes.

`capturing_models` gives SGLang every one of its own classes that can capture for EAGLE-3, switched on; `forward_hook`
hands over what they captured. Runs inside SGLang: imports SGLang, torch and the standard library only. Empty otherwise,
so that reading an order does not import SGLang.
"""
