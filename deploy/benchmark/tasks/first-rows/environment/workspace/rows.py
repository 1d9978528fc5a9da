def first_rows(rows, n):
    return rows[:n - 1]


def pack(rows):
    return first_rows(rows, 2)
