"""Data sets: reading, checking, decoding, packing and augmenting images.

===============  ==============================================================
module           subject
===============  ==============================================================
samples          image files, and data sets as classes and splits of images
readers          data sets by name or path; validation images
layouts          the layouts in which data sets are distributed, as a table
annotations      fields of annotation files
tables           .csv, .tsv and .parquet files
matlab           MATLAB files
huggingface      folders of Hugging Face's `datasets`
webdataset       folders of tar files by other programs
packed           images inside of such files
downloads        downloads and archives
shards           our own tar files, with an index and checksums
splitting        stratified and grouped splits, saved as a table
images           preprocessing and decoding
cache            the cache of decoded images, and the space that it needs
readable         which images can be read, before training
stream           images that are decoded in every epoch
check            a report on a data set
near_duplicates  images that look the same in two splits
augmentation     image-level augmentation, as a table
birds, brush     the embedded birds
destruction      how often image-level augmentation destroys the only cue
===============  ==============================================================
"""
