from trainwright.callbacks.base import Callback
class ModelPruning(Callback):
    """x"""
