// A view of some rows of another column: from `first` on, and for headers with null in place of an empty
// list, as Spark's Kafka connector shows them.  It owns no memory.
package pk.reader;

import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

final class RowsOf extends ColumnVector {
  private final ColumnVector inner;
  private final int first;
  private final int count;
  private final boolean lists;

  private RowsOf(ColumnVector inner, int first, int count, boolean lists) {
    super(inner.dataType());
    this.inner = inner;
    this.first = first;
    this.count = count;
    this.lists = lists;
  }

  /** Returns rows `[first, first + count)` of a column; the column itself if it needs no view. */
  static ColumnVector of(ColumnVector inner, int first, int count) {
    boolean lists = inner.dataType() instanceof ArrayType;
    return first == 0 && !lists ? inner : new RowsOf(inner, first, count, lists);
  }

  @Override
  public void close() {
    // the inner column belongs to the reader of the file
  }

  @Override
  public boolean hasNull() {
    return lists ? numNulls() > 0 : inner.hasNull();
  }

  @Override
  public int numNulls() {
    int found = 0;
    for (int row = 0; row < count; row++) {
      found += isNullAt(row) ? 1 : 0;
    }
    return found;
  }

  @Override
  public boolean isNullAt(int row) {
    return inner.isNullAt(first + row)
        || (lists && inner.getArray(first + row).numElements() == 0);
  }

  @Override
  public boolean getBoolean(int row) {
    return inner.getBoolean(first + row);
  }

  @Override
  public byte getByte(int row) {
    return inner.getByte(first + row);
  }

  @Override
  public short getShort(int row) {
    return inner.getShort(first + row);
  }

  @Override
  public int getInt(int row) {
    return inner.getInt(first + row);
  }

  @Override
  public long getLong(int row) {
    return inner.getLong(first + row);
  }

  @Override
  public float getFloat(int row) {
    return inner.getFloat(first + row);
  }

  @Override
  public double getDouble(int row) {
    return inner.getDouble(first + row);
  }

  @Override
  public ColumnarArray getArray(int row) {
    return isNullAt(row) ? null : inner.getArray(first + row);
  }

  @Override
  public ColumnarMap getMap(int row) {
    return inner.getMap(first + row);
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    return inner.getDecimal(first + row, precision, scale);
  }

  @Override
  public UTF8String getUTF8String(int row) {
    return inner.getUTF8String(first + row);
  }

  @Override
  public byte[] getBinary(int row) {
    return inner.getBinary(first + row);
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    throw new UnsupportedOperationException("no column of a topic is a struct");
  }
}
