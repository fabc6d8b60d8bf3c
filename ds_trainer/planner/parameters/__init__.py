"""The parameters of a model as a list of shapes, from its configuration alone or from a module."""
