"""``ridgeline bench gpu``: is the code right on this card, and how fast is it?"""
