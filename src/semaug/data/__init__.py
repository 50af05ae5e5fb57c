"""Data sets: reading, checking, decoding, packing and augmenting images.

============  ==============================================================
module        subject
============  ==============================================================
samples       data sets as classes and splits of labelled images
readers       data sets by name or path; validation images
layouts       the layouts in which data sets are distributed, as a table
annotations   fields of annotation files
tables        .csv, .tsv and .parquet files
matlab        MATLAB files
downloads     downloads and archives
shards        data sets in tar files
images        preprocessing, and decoding into a cache
cache         what that cache holds, and how to empty it
readable      which images can be read, before training
space         free memory and disk space, before decoding
stream        images that are decoded in every epoch
check         a report on a data set
augmentation  image-level augmentation, as a table
birds, brush  procedural birds
destruction   how often image-level augmentation destroys the only cue
============  ==============================================================
"""
