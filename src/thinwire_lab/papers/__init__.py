"""The five papers behind this library, one folder each. Do their claims hold?"""
