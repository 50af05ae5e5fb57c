"""Trained classifiers: load, evaluate, predict, export.

loop        decode images ahead in threads; run a network on batches of pixels
runs        the files of a run directory: settings and metrics
manifest    checksums of these files
classifier  a network with its classes and preprocessing, from any source
onnx_model  a network in an ONNX file
evaluation  scores of a classifier on a split
calibration the temperature of the logits, and when not to answer
ensemble    average the probabilities of several classifiers
soup        average the weights of several runs
prediction  classify image files; write CSV or JSON lines
exporting   a folder with weights, ONNX and a model card, which timm can load
embedding   features of images, to compare images
pictures    sample images with their predictions, for the report
"""

from semaug.inference.classifier import Classifier, load_classifier, open_classifier
from semaug.inference.evaluation import evaluate
from semaug.inference.exporting import export
from semaug.inference.prediction import expand, predict, write

__all__ = ["Classifier", "evaluate", "expand", "export", "load_classifier", "open_classifier", "predict", "write"]
