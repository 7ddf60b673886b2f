"""What a library's kernels do, found out by running them: for the record, and for versions that
nobody has put on record."""
