"""The dtype of each equation is chosen here. `choices` goes forward and decides: `pins`
says what has to be f32, `trade_offs` what may be f32 or half. `demands` goes back from
the readers of each value and takes the options that hold.
"""
