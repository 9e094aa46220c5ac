"""A sanitizer for kernels that Triton's interpreter runs, where no device can run NVIDIA's.

The interpreter runs the programs of a launch one after another, on addresses of this process. So it
hides accesses outside of tensors, memory that nothing has written, races between programs, what
their order changes, and what a kernel reads that begins before the preceding one has ended. Here
each is watched for; see `sanitizer.py`.
"""
