"""The figures of a program while it runs. Its arrays are read together, in blocks;
errors are measured in a program that runs the plan and the function side by side.
"""
