"""What a plan knows of values. One solver goes through calls, branches and loops for
all analyses, and each analysis says what holds of a value and how two values join; no
dtype is chosen here.
"""
