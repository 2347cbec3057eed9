"""What a node keeps on its disk: blobs of a run, read and written as files of a hostile process."""
