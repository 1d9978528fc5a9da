EXTRA = 4


def area(width, depth):
    return width + depth
