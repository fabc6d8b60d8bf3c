"""Keras 3 models and ``tf.data`` pipelines; keras and tensorflow are imported where they are used."""
