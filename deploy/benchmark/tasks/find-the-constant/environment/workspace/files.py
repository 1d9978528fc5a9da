MAX_UPLOAD = 16


def fits(n):
    return n <= MAX_UPLOAD
