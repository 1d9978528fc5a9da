BATCH = 12


def send(n):
    return n // BATCH
