//! Reads of many tensors at once.

use burn_backend::{
    ExecutionError,
    ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData},
};

use super::{Held, HeldTensor};
use crate::data::DataBackend;

impl<B: DataBackend> TransactionOps<Self> for Held<B> {
    async fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> Result<TransactionPrimitiveData, ExecutionError> {
        let floats = transaction.read_floats.into_iter();
        B::tr_execute(TransactionPrimitive::new(
            floats.map(HeldTensor::into_value).collect(),
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
        .await
    }
}
