-- Ends the job for good after a checkpoint.
obj.spec.cancel = true
return obj
