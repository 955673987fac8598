//! Reads of many tensors at once.

use burn_backend::{
    ExecutionError,
    ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData},
};

use super::QuantTrain;
use super::tensor::QuantTensor;
use crate::{recipe::Recipe, saved::recorded::QuantBackend};

impl<B: QuantBackend, R: Recipe> TransactionOps<Self> for QuantTrain<B, R> {
    async fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> Result<TransactionPrimitiveData, ExecutionError> {
        let floats = transaction
            .read_floats
            .into_iter()
            .map(QuantTensor::into_primitive)
            .collect();
        <B::Inside>::tr_execute(TransactionPrimitive::new(
            floats,
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
        .await
    }
}
