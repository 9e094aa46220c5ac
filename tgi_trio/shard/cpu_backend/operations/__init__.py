"""The operations of a step, part by part of a layer: rows of the table that the kernels run."""
