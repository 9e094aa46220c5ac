"""One row per model type: from a config.json to a decoder's specification, and the names of its
tensors.
"""
