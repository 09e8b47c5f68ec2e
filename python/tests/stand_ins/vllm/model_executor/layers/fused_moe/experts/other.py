class OtherExperts:
    pass
